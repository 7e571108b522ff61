#!/bin/sh
# Finds Chromium for the tests of the metrics server's page, and installs it from Debian's packages where it is missing.
#
#   sh tools/chromium_for_tests.sh
#
# Prints the program's path on standard output. Where there is none and it cannot be installed, it prints one line on
# standard error that says what to install, and exits with status 1.
#
# Environment:
#   CHROMIUM  program to use instead of the one found here
set -u

fail() {
    printf 'steptron: %s\n' "$1" >&2
    exit 1
}

# found: prints the path of a Chromium that is installed.
found() {
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        command -v "$name" 2>/dev/null && return 0
    done
    return 1
}

if [ -n "${CHROMIUM:-}" ]; then
    command -v "$CHROMIUM" || fail "CHROMIUM=$CHROMIUM is no program"
    exit 0
fi
found && exit 0

command -v apt-get >/dev/null 2>&1 ||
    fail "the tests of the metrics page need Chromium: install it with your distribution's packages, or set CHROMIUM"
as_root=""
if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        as_root="sudo -n"
    else
        fail "the tests of the metrics page need Chromium: sudo apt-get install chromium"
    fi
fi
log=$(mktemp) || fail "there is no room for a temporary file"
trap 'rm -f "$log"' EXIT
# A package list that is out of date names files that are gone: it is read anew, and failing at that is not yet an end.
$as_root apt-get update >"$log" 2>&1 || true
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y --no-install-recommends chromium fonts-dejavu-core >>"$log" 2>&1 || {
    tail -n 5 "$log" >&2
    fail "apt-get install chromium failed; install Chromium by hand, or set CHROMIUM"
}
found || fail "the package chromium brought no program of that name; set CHROMIUM"
