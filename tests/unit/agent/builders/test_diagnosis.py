"""Diagnosis on what real programs printed when they failed (golden/outputs), and on words of those not at hand here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diamond.agent.builders.diagnosis import MAX_EXCERPT_LINES, MAX_LINE_CHARS, TABLE, diagnose
from diamond.core.recipes import Recipe

OUTPUTS = Path(__file__).parent / "golden/outputs"
RECIPE = Recipe.parse(
    {
        "base": "docker://debian:13",
        "system": ["git=1:99.0-1", "no-such-pkg", "curl"],
        "pip": [
            *("numpy==1.21.2", "requests==2.31.0", "urllib3==1.20", "six==99.0", "No_Such.Package-ZZ==1.0"),
            *("psutil[test]", "needs-header @ https://example.org/x.tgz"),
        ],
        "build": "echo a\ncmakee ..\ncat 'x\necho hi; exit 3\nmake -j8\n",
        "test": "python3 -c 'import torch'",
    }
)


@pytest.mark.parametrize(
    ("name", "stage", "code", "message", "line"),
    [
        ("apt_missing", "system", "package_not_found", "has no package no-such-pkg", "system: no-such-pkg"),
        ("apt_version", "system", "package_version", "that version of git", "system: git=1:99.0-1"),
        ("apt_resolve", "system", "no_network", "no network", ""),
        ("apt_refused", "system", "no_network", "no network", ""),
        ("apt_release", "system", "index_outdated", "end of life", ""),
        ("apt_no_fakeroot", "system", "fakeroot", "needs fakeroot", ""),
        ("apt_not_root", "system", "fakeroot", "needs fakeroot", ""),
        ("apptainer_no_network", "base", "registry_unreachable", "docker.io", "base: docker://debian:13"),
        ("apptainer_cut", "base", "registry_unreachable", "docker.io", "base: docker://debian:13"),
        ("charliecloud_no_network", "base", "registry_unreachable", "docker.io", "base: docker://debian:13"),
        ("apptainer_no_file", "base", "base_not_found", "no base docker://debian:13", "base: docker://debian:13"),
        ("pip_missing", "pip", "distribution_not_found", "no no-such-package-zz==1.0", "pip: No_Such.Package-ZZ==1.0"),
        ("pip_version", "pip", "version_not_found", "fits six==99.0", "pip: six==99.0"),
        ("pip_python", "pip", "python_version", "numpy==1.21.2 does not fit the Python", "pip: numpy==1.21.2"),
        ("pip_conflict", "pip", "version_conflict", "requests==2.31.0 and urllib3==1.20", "pip: requests==2.31.0"),
        ("pip_invalid", "pip", "invalid_requirement", "'six === nonsense here'", "pip: six==99.0"),
        ("pip_hash", "pip", "hash_mismatch", "not what its digest says", ""),
        ("pip_externally_managed", "commands", "externally_managed", "belongs to its distribution", ""),
        ("pip_refused", "pip", "no_network", "no network", ""),
        ("pip_resolve", "pip", "no_network", "no network", ""),
        ("pip_no_compiler", "pip", "no_compiler", "no compiler", "pip: psutil[test]"),
        ("pip_no_header", "pip", "no_header", "hdf5.h is missing", "pip: needs-header @ https://example.org/x.tgz"),
        ("pip_no_cmake", "pip", "no_cmake", "no CMake", ""),
        ("pip_build_dependency", "pip", "build_dependency", "needs packaging while it is being built", ""),
        ("pip_git_no_network", "pip", "no_network", "no network", ""),
        ("pip_disk_full", "pip", "disk_full", "the disk is full", ""),
        ("gcc_no_python_headers", "commands", "no_python_headers", "Python's own header files", ""),
        ("curl_resolve", "commands", "no_network", "no network", ""),
        ("curl_certificate", "commands", "certificate", "certificate is not trusted", ""),
        ("python_memory", "commands", "out_of_memory", "out of memory", ""),
        ("command_killed", "commands", "out_of_memory", "out of memory", "build line 1: echo a"),
        ("command_not_found", "commands", "command_not_found", "no program cmakee", "build line 2: cmakee .."),
        ("command_syntax", "commands", "syntax_error", "cannot read the commands", "build line 3: cat 'x"),
        ("test_no_module", "test", "module_not_found", "no module torch", "test line 1: python3 -c 'import torch'"),
    ],
)
def test_real_failures_are_understood(name: str, stage: str, code: str, message: str, line: str) -> None:
    text = (OUTPUTS / f"{name}.txt").read_text()
    found = diagnose(stage, RECIPE, text, "apptainer", "login")
    assert (found.stage, found.code, found.line) == (stage, code, line)
    assert message in found.message
    assert found.hint
    # The excerpt is made of lines of the log, has the decisive one, and is short.
    shown = found.excerpt.split("\n")
    decisive = TABLE[code].find(text, stage)[0][0].strip().split("\n")[0][:100]
    assert decisive in found.excerpt
    assert len(shown) <= 2 * MAX_EXCERPT_LINES
    for row in shown:
        assert row == "…" or all(part in text for part in row.split(" … ")), row


def test_every_kept_output_is_used_above() -> None:
    mark = next(mark for mark in test_real_failures_are_understood.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == {path.stem for path in OUTPUTS.glob("*.txt")}


@pytest.mark.parametrize(
    ("text", "stage", "code"),
    [
        ("No match for argument: foo\nError: Unable to find a match: foo", "system", "package_not_found"),
        ("No package foo available.\nError: Nothing to do", "system", "package_not_found"),
        ("error: No package matches 'foo'", "system", "package_not_found"),
        ("ERROR: unable to select packages:\n  foo (no such package):\n    required by: world[foo]", "system",
         "package_not_found"),
        ("No provider of 'foo' found.", "system", "package_not_found"),
        ("E: Package 'foo' has no installation candidate", "system", "package_not_found"),
        ("tar: ./x: Cannot write: Disk quota exceeded", "pack", "quota"),
        ("FATAL:   While performing build: packer failed to pack: write x: no space left on device", "pack",
         "disk_full"),
        ("ERROR  : Failed to create container process: No space left on device", "base", "user_namespaces"),
        ("ERROR  : Failed to create user namespace: user namespace disabled", "base", "user_namespaces"),
        ("ch-run[12]: error: can't init user+mount namespaces: Operation not permitted", "base", "user_namespaces"),
        ("FATAL:   Building with encryption unprivileged requires unprivileged user namespaces", "base",
         "user_namespaces"),
        ("cannot clone: Operation not permitted\nError: cannot re-exec process", "base", "user_namespaces"),
        ("potentially insufficient UIDs or GIDs available in user namespace", "base", "fakeroot"),
        ("newuidmap: executable file not found\nERROR  : 'newuidmap' execution failed.", "base", "fakeroot"),
        ("E: setgroups 65534 failed - setgroups (1: Operation not permitted)", "system", "fakeroot"),
        ("/bin/sh: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by "
         "/.singularity.d/libs/faked)", "system", "fakeroot_libc"),
        ("FATAL: toomanyrequests: You have reached your pull rate limit.", "base", "rate_limited"),
        ("Error: initializing source docker://x: reading manifest 9 in library/debian: manifest unknown", "base",
         "base_not_found"),
        ("requested access to the resource is denied", "base", "unauthorized"),
        ("FATAL: unauthorized: authentication required", "base", "unauthorized"),
        ("no image found in manifest list for architecture arm64, variant \"v8\", OS linux", "base",
         "base_architecture"),
        ("exec /bin/sh: exec format error", "system", "base_architecture"),
        ("ERROR: Could not install packages: HTTPSConnectionPool(host='x', port=443): Read timed out.", "pip",
         "index_timeout"),
        ("OSError('Tunnel connection failed: 403 Forbidden')\nERROR: No matching distribution found for six", "pip",
         "proxy"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate'))", "pip",
         "certificate"),
        ("E: Failed to fetch http://x/y.deb  Hash Sum mismatch", "system", "hash_mismatch"),
        ("ERROR: Package 'x' requires a different Python: 3.9.2 not in '>=3.10'", "pip", "python_version"),
        ("/usr/bin/python3: No module named pip", "pip", "no_pip"),
        ("diamond: the base has no conda: take one with micromamba", "conda", "base_lacks"),
        ("PackagesNotFoundError: The following packages are not available from current channels:\n\n  - foo", "conda",
         "conda_not_found"),
        ("error: can't find Rust compiler", "pip", "no_rust"),
        ("gcc: fatal error: cannot execute 'cc1plus': execvp: No such file or directory", "pip", "no_compiler"),
        ("g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.", "pip", "out_of_memory"),
        ("ERROR: Cannot find command 'git' - do you have 'git' installed and in your PATH?", "pip", "no_git"),
        ("  ERROR: Failed building wheel for foo", "pip", "wheel_failed"),
        ("dpkg: error processing package systemd (--configure):\n installed systemd package", "system",
         "package_script"),
        ("ImportError: libGL.so.1: cannot open shared object file: No such file or directory", "test",
         "library_not_found"),
        ("RuntimeError: Found no NVIDIA driver on your system.", "test", "no_gpu"),
        ("AssertionError\ndiamond: test line 1 ended with 1: python -c 'assert 0'", "test", "test_failed"),
        ("diamond: build line 5 ended with 2: make -j8", "commands", "command_failed"),
    ],
)  # fmt: skip
def test_words_of_programs_that_are_not_here(text: str, stage: str, code: str) -> None:
    assert diagnose(stage, RECIPE, text, "apptainer", "login").code == code


def test_an_unreachable_host_is_named_with_what_to_do() -> None:
    text = (OUTPUTS / "apptainer_no_network.txt").read_text()
    elsewhere = Recipe.parse({"base": "docker://registry.example.org:5000/team/tool:1"})
    found = diagnose("base", elsewhere, text, "apptainer", "login")
    assert "registry.example.org:5000" in found.message
    assert "name its path" in found.hint
    found = diagnose("pip", RECIPE, "Could not resolve host: wheels.example.org", "apptainer", "login")
    assert "wheels.example.org cannot be reached" in found.message


def test_what_a_command_said_stands_above_its_end() -> None:
    text = "one\ntwo\ncp: cannot stat 'nosuch.txt': No such file or directory\ndiamond: build line 1 ended with 1: cp"
    found = diagnose("commands", RECIPE, text, "apptainer", "login")
    assert found.code == "file_not_found"
    assert "nosuch.txt" in found.message and "`files`" in found.hint
    assert found.excerpt == text
    text = "configure: x\nit does not work\ndiamond: build line 5 ended with 2: make -j8"
    found = diagnose("commands", RECIPE, text, "apptainer", "login")
    assert (found.code, found.excerpt) == ("command_failed", text)
    assert found.hint
    earlier = f"rm: cannot remove 'x': No such file or directory\n{text}"  # was not what ended it
    assert diagnose("commands", RECIPE, earlier, "apptainer", "login").code == "command_failed"


def test_a_batch_job_without_network_is_sent_to_the_login_node() -> None:
    text = (OUTPUTS / "pip_resolve.txt").read_text()
    assert "--where login" in diagnose("pip", RECIPE, text, "apptainer", "batch").hint
    assert "proxy" in diagnose("pip", RECIPE, text, "apptainer", "login").hint


def test_hints_fit_the_builder() -> None:
    text = (OUTPUTS / "pip_no_compiler.txt").read_text()
    assert "build-essential" in diagnose("pip", RECIPE, text, "apptainer", "login").hint
    assert "module load gcc" in diagnose("pip", RECIPE, text, "venv", "batch").hint


def test_a_version_that_never_existed_is_not_blamed_on_python() -> None:
    text = (OUTPUTS / "pip_python.txt").read_text().replace("numpy==1.21.2", "numpy==77.0")
    assert diagnose("pip", RECIPE, text, "apptainer", "login").code == "version_not_found"
    newer = text.replace("numpy==77.0", "numpy>=2.5")
    assert diagnose("pip", RECIPE, newer, "apptainer", "login").code == "python_version"


def test_the_line_of_an_exit_is_found_by_its_command() -> None:
    text = "hi\ndiamond: build line ? ended with 3: exit 3"
    found = diagnose("commands", RECIPE, text, "apptainer", "login")
    assert found.line == "build line 4: echo hi; exit 3"
    twice = Recipe.parse({"base": "host", "build": "exit 3\nexit 3"})
    assert diagnose("commands", twice, text, "venv", "login").line == ""


def test_a_dependency_is_traced_to_the_line_that_wants_it() -> None:
    text = (
        "ERROR: Could not find a version that satisfies the requirement deep==9 (from requests) (from versions: none)\n"
        "ERROR: No matching distribution found for deep==9 (from requests)"
    )
    assert diagnose("pip", RECIPE, text, "apptainer", "login").line == "pip: requests==2.31.0"


def test_passwords_in_addresses_are_not_shown() -> None:
    text = "WARNING: x 'https://me:hunter2@index.example/simple' Name or service not known\nERROR: https://me:hunter2@y"
    found = diagnose("pip", RECIPE, text, "apptainer", "login")
    assert "hunter2" not in repr(found)
    assert "me:***@index.example" in found.excerpt


def test_colours_and_progress_bars_are_taken_out() -> None:
    text = "\x1b[31mERROR: No matching distribution found for foo\x1b[0m\n10%\r50%\rE: done badly\r\n"
    found = diagnose("pip", RECIPE, text, "apptainer", "login")
    assert found.excerpt == "ERROR: No matching distribution found for foo\nE: done badly"


def test_what_nobody_has_a_rule_for_shows_the_alarming_lines() -> None:
    text = "\n".join(
        [*(f"fine {n}" for n in range(150)), "error: the moon is in the way", *("more" for _ in range(40))]
    )
    found = diagnose("commands", RECIPE, text, "apptainer", "login")
    assert (found.code, found.excerpt) == ("", "error: the moon is in the way")
    assert "files and build commands" in found.message
    assert "diamond image logs" in found.hint
    plain = diagnose("pack", RECIPE, "one\n\ntwo", "apptainer", "login")
    assert plain.excerpt == "one\n…\ntwo"
    assert diagnose("pack", RECIPE, "", "apptainer", "login").excerpt == ""


def test_a_huge_log_is_read_in_no_time_and_shown_in_part() -> None:
    text = "\n".join(f"ERROR: {'x' * 5000} {n}" for n in range(200))
    found = diagnose("pip", RECIPE, text, "apptainer", "login")
    assert len(found.excerpt) < 2 * MAX_EXCERPT_LINES * (MAX_LINE_CHARS + 5)


def test_the_table_is_sound() -> None:
    for code, symptom in TABLE.items():
        assert re.fullmatch(r"[a-z_]+", code)
        assert symptom.message and not symptom.message.endswith(".")
        for pattern in symptom.patterns:
            assert re.compile(pattern).search("") is None, f"{code}: {pattern!r} matches nothing in particular"
            if "{what}" in symptom.message and "?P<what>" not in pattern:
                # Then the recipe's line stands in, or nothing: the sentence must do without.
                assert symptom.message.replace("{what}", "").strip()
