"""tools/preflight.sh on simulated machines: one line that says what to install, or the interpreter to use."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PREFLIGHT = Path(__file__).resolve().parents[2] / "tools" / "preflight.sh"


@dataclass
class Machine:
    """A folder of fake commands that is the whole PATH of the script."""

    folder: Path
    commands: dict[str, str] = field(default_factory=dict)

    def command(self, name: str, script: str) -> Machine:
        self.commands[name] = script
        return self

    def python(
        self, name: str, version: str | None, *, venv: bool = True, headers: bool = True, folder: Path | None = None
    ) -> Machine:
        """A fake interpreter; ``version`` None is one that does not run, as a pyenv shim without a version."""
        if version is None:
            return self.command(name, "exit 127")
        script = (
            'case "$2" in\n'
            f"*version_info*) echo {version} ;;\n"
            f"*ensurepip*) exit {0 if venv else 1} ;;\n"
            f"*Python.h*) exit {0 if headers else 1} ;;\n"
            "*) exit 3 ;;\n"
            "esac"
        )
        if folder is None:
            return self.command(name, script)
        folder.mkdir(parents=True)
        _write_command(folder / name, script)
        return self

    def without(self, name: str) -> Machine:
        del self.commands[name]
        return self

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        binaries = self.folder / "bin"
        binaries.mkdir()
        for name, script in self.commands.items():
            _write_command(binaries / name, script)
        return subprocess.run(
            ["/bin/sh", str(PREFLIGHT)],
            env={"PATH": str(binaries), "HOME": str(self.folder), **environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


def _write_command(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A Debian machine without any Python, with everything else."""
    return Machine(
        tmp_path,
        {
            "uname": 'case "$1" in -s) echo Linux ;; -m) echo x86_64 ;; esac',
            "getconf": "echo glibc 2.36",
            "id": "echo 0",
            "apt-get": "exit 0",
            "g++": "exit 0",
        },
    )


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The message of a refusal: exactly one line, and nothing on standard output."""
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("steptron: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def chosen(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


def test_python_3_11_is_preferred(machine: Machine) -> None:
    assert chosen(machine.python("python3.12", "3.12").python("python3.11", "3.11").run()) == "python3.11"


def test_python_that_does_not_run_is_passed_over(machine: Machine) -> None:
    assert chosen(machine.python("python3.11", None).python("python3.12", "3.12").run()) == "python3.12"


def test_plain_python3_is_used_when_its_version_is_right(machine: Machine) -> None:
    assert chosen(machine.python("python3", "3.12").run()) == "python3"


def test_version_can_be_asked_for(machine: Machine) -> None:
    assert chosen(machine.python("python3.11", "3.11").python("python3.12", "3.12").run(WANT="3.12")) == "python3.12"


def test_pyenv_versions_are_found(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "pyenv" / "versions" / "3.12.4" / "bin"
    machine.python("python3.11", None).python("python3.12", "3.12", folder=folder)
    assert chosen(machine.run(PYENV_ROOT=str(tmp_path / "pyenv"))) == str(folder / "python3.12")


def test_given_python_is_taken(machine: Machine) -> None:
    result = machine.python("python3.11", "3.11").python("mine", "3.12").run(PYTHON="mine")
    assert chosen(result) == "mine"


def test_given_python_of_another_version_is_refused(machine: Machine) -> None:
    message = refusal(machine.python("python3.11", "3.11").python("python3.13", "3.13").run(PYTHON="python3.13"))
    assert "PYTHON=python3.13 is Python 3.13: give the path of Python 3.11 or 3.12" in message


def test_given_python_that_does_not_run_is_refused(machine: Machine) -> None:
    assert "PYTHON=nowhere does not run" in refusal(machine.python("python3.11", "3.11").run(PYTHON="nowhere"))


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_no_supported_python(machine: Machine, version: str) -> None:
    message = refusal(machine.python("python3", version).run())
    assert "no Python 3.11 or 3.12 found: apt-get install python3.11 python3.11-venv python3.11-dev" in message


def test_no_python_of_the_wanted_version(machine: Machine) -> None:
    message = refusal(machine.python("python3.11", "3.11").run(WANT="3.12", SETTING="PYTHON312"))
    assert "no Python 3.12 found: apt-get install python3.12 " in message
    assert "pass the path as PYTHON312=..." in message


def test_missing_venv_module(machine: Machine) -> None:
    message = refusal(machine.python("python3.12", "3.12", venv=False).run())
    assert "python3.12 has no venv module: apt-get install python3.12-venv" in message


@pytest.mark.parametrize(
    ("headers", "compiler", "missing"),
    [
        (False, True, "Python's C headers"),
        (True, False, "a C++ compiler"),
        (False, False, "a C++ compiler and Python's C headers"),
    ],
)
def test_missing_compiler_and_headers_are_one_line_but_no_refusal(
    machine: Machine, headers: bool, compiler: bool, missing: str
) -> None:
    machine.python("python3.11", "3.11", headers=headers)
    if not compiler:
        machine.without("g++")
    result = machine.run()
    assert result.returncode == 0
    assert result.stdout == "python3.11\n"
    assert result.stderr == (
        f"steptron: note: everything runs without {missing}, but the native CPU kernels (twice as fast) and "
        f"torch.compile need them: "
        "apt-get install g++ python3.11-dev\n"
    )


def test_users_other_than_root_are_told_to_use_sudo(machine: Machine) -> None:
    message = refusal(machine.python("python3.11", "3.11", venv=False).command("id", "echo 1000").run())
    assert "sudo apt-get install python3.11-venv" in message


def test_fedora_is_told_dnf(machine: Machine) -> None:
    message = refusal(machine.without("apt-get").command("dnf", "exit 0").run())
    assert "dnf install python3.11 python3.11-devel" in message


def test_another_system_is_refused(machine: Machine) -> None:
    machine.python("python3.11", "3.11").command("uname", 'case "$1" in -s) echo Darwin ;; -m) echo arm64 ;; esac')
    assert "needs Linux, and this is Darwin" in refusal(machine.run())


def test_another_processor_is_refused(machine: Machine) -> None:
    machine.python("python3.11", "3.11").command("uname", 'case "$1" in -s) echo Linux ;; -m) echo aarch64 ;; esac')
    assert "needs an x86-64 machine, and this one is aarch64" in refusal(machine.run())


@pytest.mark.parametrize(
    ("getconf", "expected"),
    [("exit 1", "needs a Linux distribution with glibc"), ("echo glibc 2.17", "needs glibc 2.28 or newer")],
)
def test_c_library_that_torch_has_no_packages_for(machine: Machine, getconf: str, expected: str) -> None:
    assert expected in refusal(machine.python("python3.11", "3.11").command("getconf", getconf).run())


def test_the_interpreter_that_runs_the_tests_is_accepted() -> None:
    """The checks themselves on a real interpreter: a mistake in their Python code would refuse every machine."""
    result = subprocess.run(
        ["/bin/sh", str(PREFLIGHT)],
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == sys.executable
