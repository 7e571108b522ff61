#!/bin/sh
# A throw-away PostgreSQL server for the tests of the metrics server.
#
#   sh tools/postgres_for_tests.sh install         installs PostgreSQL where it is missing (Debian or Ubuntu)
#   sh tools/postgres_for_tests.sh start FOLDER    makes a cluster in FOLDER, starts it, prints its URL on standard output
#   sh tools/postgres_for_tests.sh halt FOLDER     stops it as if its process were killed, and keeps FOLDER
#   sh tools/postgres_for_tests.sh resume FOLDER   starts it again
#   sh tools/postgres_for_tests.sh stop FOLDER     stops it and deletes FOLDER
#
# `start` installs too. The server listens at a Unix socket in FOLDER only, trusts whoever can reach that, and syncs
# nothing to disk: it is for data that may be lost. PostgreSQL refuses to run as root; then the user `postgres`, or
# `nobody`, runs it.
#
# Environment:
#   POSTGRES_BIN  folder of initdb and pg_ctl, instead of the newest in /usr/lib/postgresql or the PATH
set -eu

fail() {
    printf 'postgres_for_tests: %s\n' "$1" >&2
    exit 1
}

find_bin() {
    if [ -n "${POSTGRES_BIN:-}" ]; then
        [ -x "$POSTGRES_BIN/initdb" ] || fail "POSTGRES_BIN=$POSTGRES_BIN holds no initdb"
        printf '%s\n' "$POSTGRES_BIN"
        return 0
    fi
    newest=$(for candidate in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin; do
        [ ! -x "$candidate/initdb" ] || printf '%s\n' "$candidate"
    done | sort -V | tail -n 1)
    if [ -n "$newest" ]; then
        printf '%s\n' "$newest"
    elif command -v initdb >/dev/null 2>&1; then
        dirname "$(command -v initdb)"
    else
        return 1
    fi
}

install_postgres() {
    ! find_bin >/dev/null || return 0
    command -v apt-get >/dev/null 2>&1 ||
        fail "PostgreSQL's server is missing: install your distribution's package and set POSTGRES_BIN"
    sudo=""
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null ||
            fail "PostgreSQL's server is missing, and installing it needs root: sudo apt-get install postgresql"
        sudo="sudo -n"
    fi
    # Without a cluster of the distribution's own, which would start a server at once.
    $sudo mkdir -p /etc/postgresql-common
    [ -e /etc/postgresql-common/createcluster.conf ] ||
        printf 'create_main_cluster = false\n' | $sudo tee /etc/postgresql-common/createcluster.conf >/dev/null
    { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        postgresql; } >&2 || fail "apt-get could not install postgresql, see above"
    find_bin >/dev/null || fail "apt-get installed postgresql, and yet /usr/lib/postgresql/*/bin/initdb is not there"
}

# as_server COMMAND...: runs it as the user that the server runs as, in a folder that this user can enter.
as_server() {
    if [ "$(id -u)" = 0 ]; then
        (cd / && setpriv --reuid "$server_user" --regid "$(id -g "$server_user")" --clear-groups "$@")
    else
        (cd / && "$@")
    fi
}

server_user=$(id -un)
if [ "$(id -u)" = 0 ]; then
    server_user=postgres
    id postgres >/dev/null 2>&1 || server_user=nobody
fi

# start_server: that of the folder.
start_server() {
    as_server "$bin/pg_ctl" --pgdata "$folder/data" --log "$folder/server.log" --wait --timeout 60 start >/dev/null ||
        fail "the server did not start: $(tail -n 5 "$folder/server.log")"
}

stop_server() {
    bin=$(find_bin) || fail "PostgreSQL is not installed"
    if [ -f "$folder/data/postmaster.pid" ]; then
        as_server "$bin/pg_ctl" --pgdata "$folder/data" --mode immediate --wait --timeout 60 stop >/dev/null ||
            fail "the server in $folder did not stop"
    fi
}

usage="usage: sh tools/postgres_for_tests.sh install | start FOLDER | halt FOLDER | resume FOLDER | stop FOLDER"
action=${1:-}
folder=${2:-}
case "$action" in
    install) ;;
    start | halt | resume | stop) [ -n "$folder" ] || fail "$usage" ;;
    *) fail "$usage" ;;
esac
case "$folder" in
    '' | /*) ;;
    *) folder=$PWD/$folder ;;
esac

case "$action" in
    install)
        install_postgres
        find_bin
        ;;
    start)
        install_postgres
        # The package makes the user, too.
        ! id postgres >/dev/null 2>&1 || [ "$(id -u)" != 0 ] || server_user=postgres
        bin=$(find_bin)
        [ ! -e "$folder/data" ] || fail "$folder/data is there already: stop that server first"
        socket=$folder/.s.PGSQL.5432
        [ "${#socket}" -le 103 ] || fail "$folder is too long a name for a Unix socket, 90 characters at most"
        mkdir -p "$folder"
        [ "$(id -u)" != 0 ] || chown "$server_user" "$folder"
        as_server test -w "$folder" || fail "the user $server_user, who runs the server, cannot reach $folder"
        as_server "$bin/initdb" --pgdata "$folder/data" --username postgres --auth trust --encoding UTF8 --locale C \
            --no-sync >"$folder/initdb.log" 2>&1 || fail "initdb failed: $(tail -n 5 "$folder/initdb.log")"
        cat >>"$folder/data/postgresql.conf" <<END
listen_addresses = ''
unix_socket_directories = '$folder'
fsync = off
full_page_writes = off
synchronous_commit = off
max_connections = 50
shared_buffers = 64MB
max_wal_size = 256MB
END
        start_server
        printf 'postgresql://postgres@/postgres?host=%s\n' "$folder"
        ;;
    halt)
        stop_server
        ;;
    resume)
        [ -f "$folder/data/PG_VERSION" ] || fail "$folder holds no server that was halted"
        bin=$(find_bin) || fail "PostgreSQL is not installed"
        start_server
        ;;
    stop)
        stop_server
        [ ! -f "$folder/data/PG_VERSION" ] || rm -rf "$folder"
        ;;
esac
