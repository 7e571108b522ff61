#!/bin/sh
# Checks that this machine can run Steptron and finds the Python to use.
#
#   sh tools/preflight.sh
#
# Prints the chosen interpreter on standard output. On a machine that will not do, it prints one line on
# standard error that says what to install, and exits with status 1. What is only wanted (a compiler) is one
# line on standard error too, without an error.
#
# Environment:
#   PYTHON  interpreter to use instead of the one found here
#   WANT    "3.11" or "3.12": accept only this version (default: either, 3.11 first)
#   SETTING what messages call the setting behind PYTHON (default: PYTHON)
set -u
setting=${SETTING:-PYTHON}

fail() {
    printf 'steptron: %s\n' "$1" >&2
    exit 1
}

# install_hint DEBIAN_PACKAGES FEDORA_PACKAGES: the command that installs them here.
install_hint() {
    sudo=""
    [ "$(id -u 2>/dev/null)" = 0 ] || sudo="sudo "
    if command -v apt-get >/dev/null 2>&1; then
        printf '%sapt-get install %s' "$sudo" "$1"
    elif command -v dnf >/dev/null 2>&1; then
        printf '%sdnf install %s' "$sudo" "$2"
    else
        printf 'install your distribution'\''s packages for: %s' "$1"
    fi
}

# version INTERPRETER: prints "3.11" and the like; nothing if it does not run (a pyenv shim without a version, say).
version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

accepted() {
    case "$1" in
        3.11 | 3.12) [ -z "${WANT:-}" ] || [ "$1" = "$WANT" ] ;;
        *) false ;;
    esac
}

find_python() {
    pyenv_versions="${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions"
    for candidate in python3.11 python3.12 python3 python \
        "$pyenv_versions"/3.11*/bin/python3.11 "$pyenv_versions"/3.12*/bin/python3.12; do
        if command -v "$candidate" >/dev/null 2>&1 && accepted "$(version "$candidate")"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

system=$(uname -s)
[ "$system" = Linux ] ||
    fail "needs Linux, and this is $system: on Windows use WSL2 (wsl --install), elsewhere a Linux container or virtual machine"
machine=$(uname -m)
[ "$machine" = x86_64 ] || fail "needs an x86-64 machine, and this one is $machine"
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) ||
    fail "needs a Linux distribution with glibc (Debian, Ubuntu, Fedora, ...): PyTorch has no packages for musl (Alpine)"
glibc_minor=${glibc##*.}
[ "$glibc_minor" -ge 28 ] || fail "needs glibc 2.28 or newer for PyTorch, and this is $glibc: use a newer distribution (Debian 10, Ubuntu 20.04 or later)"

wanted="Python ${WANT:-3.11 or 3.12}"
if [ -n "${PYTHON:-}" ]; then
    found=$(version "$PYTHON")
    [ -n "$found" ] || fail "$setting=$PYTHON does not run: give the path of $wanted"
    accepted "$found" || fail "$setting=$PYTHON is Python $found: give the path of $wanted"
    python=$PYTHON
elif ! python=$(find_python); then
    suggestion=${WANT:-3.11}
    fail "no $wanted found: $(install_hint "python$suggestion python$suggestion-venv python$suggestion-dev" "python$suggestion python$suggestion-devel"), or 'pyenv install $suggestion', or pass the path as $setting=..."
fi
number=$(version "$python")

"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    fail "$python has no venv module: $(install_hint "python$number-venv" "python$number")"

# What is compiled during installation makes a CPU faster and is not needed: no reason to stop.
missing=""
command -v g++ >/dev/null 2>&1 || command -v c++ >/dev/null 2>&1 || missing="a C++ compiler"
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    missing="${missing:+$missing and }Python's C headers"
[ -z "$missing" ] ||
    printf 'steptron: note: everything runs without %s, but the native CPU kernels (twice as fast) and torch.compile need them: %s\n' "$missing" \
        "$(install_hint "g++ python$number-dev" "gcc-c++ python$number-devel")" >&2

printf '%s\n' "$python"
