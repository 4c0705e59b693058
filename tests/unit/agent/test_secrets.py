"""A job's secrets at the endpoint: written for the job alone, hidden in what is told, gone when it is over."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from diamond.agent.cache import Cache
from diamond.agent.link import Link
from diamond.agent.policy import parse_policy
from diamond.agent.secrets import Vault, clear
from diamond.agent.staging import Stager, StagingFailed
from diamond.core.codec import encode
from diamond.core.errors import DiamondError, InvalidInput, NotFound, ServerUnreachable
from diamond.core.images import ImageUse
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.secrets import JobSecret, JobSecrets
from diamond.core.states import Desired, JobState
from diamond.core.tasks import Output, TaskSpec
from diamond.core.wire import JobOrder, JobReport

VALUE, NETRC = "s3cret-ßtoken", "machine x\npassword hunter2hunter2\n"
JOB = "job_00000001"
GIVEN = (
    JobSecret(variable="TOKEN", value=VALUE, version="sec_1@1"),
    JobSecret(variable="NETRC", value=NETRC, file=True, version="sec_2@1"),
)


class Source:
    """The one route of the server that matters here."""

    def __init__(self, *secrets: JobSecret) -> None:
        self.secrets = secrets
        self.error: DiamondError | None = None
        self.asked: list[str] = []

    def call(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        self.asked.append(f"{method} {path}")
        if self.error is not None:
            raise self.error
        return encode(JobSecrets(job_id=JOB, secrets=self.secrets))


@pytest.fixture
def source() -> Source:
    return Source(*GIVEN)


@pytest.fixture
def vault(source: Source) -> Vault:
    return Vault(cast(Link, source))


def order(**more: Any) -> JobOrder:
    spec = {"run": "true", "secrets": {"TOKEN": "hf", "NETRC": {"secret": "netrc", "file": True}}}
    return JobOrder(
        job_id=JOB,
        task_id="tsk_00000001",
        task_name="t",
        attempt=1,
        desired=Desired.RUN,
        spec=TaskSpec.parse(spec),
        **more,
    )


def stage(vault: Vault, folder: Path, asked: JobOrder) -> RunDir:
    cache = Cache(folder / "cache", cast(Link, None))
    stager = Stager(cache=cache, stop=threading.Event(), vault=vault)
    try:
        stager.stage(asked, folder / "jobs" / JOB)
    finally:
        stager.close()
    return RunDir(folder / "jobs" / JOB)


def everything(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_staging_writes_them_for_the_job_alone(vault: Vault, source: Source, tmp_path: Path) -> None:
    run_dir = stage(vault, tmp_path, order())
    assert source.asked == [f"GET /agent/jobs/{JOB}/secrets"]
    path = run_dir.secret_files / "NETRC"
    assert run_dir.secrets.read_bytes() == f"TOKEN={VALUE}\0NETRC={path}\0".encode()
    assert path.read_text() == NETRC
    for file, mode in ((run_dir.secrets, 0o600), (path, 0o600), (run_dir.secret_files, 0o700)):
        assert file.stat().st_mode & 0o777 == mode
    assert not run_dir.secrets_script.exists(), "only for images"
    clear(run_dir)
    left = everything(run_dir.path)
    assert VALUE.encode() not in left and b"hunter2" not in left, "in no other file"
    assert b"sec_1@1" in run_dir.secret_versions.read_bytes()


def test_an_image_gets_them_as_lines_of_a_shell(vault: Vault, tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "bin").mkdir(parents=True)
    run_dir = stage(vault, tmp_path, order(image=ImageUse(kind="venv", path=str(image))))
    assert f"export TOKEN='{VALUE}'\n" in run_dir.secrets_script.read_text()
    assert run_dir.secrets_script.stat().st_mode & 0o777 == 0o600
    assert VALUE not in run_dir.enter.read_text() + run_dir.inside.read_text() + run_dir.env_script.read_text()
    assert "secrets.sh" in run_dir.enter.read_text()


def test_one_that_is_gone_fails_the_job_by_name(vault: Vault, source: Source, tmp_path: Path) -> None:
    source.error = InvalidInput("the secret 'hf' is not any more", field="secrets.TOKEN")
    with pytest.raises(StagingFailed, match="'hf'") as caught:
        stage(vault, tmp_path, order())
    assert caught.value.reason == Reason.SECRET_MISSING
    source.error, source.secrets = None, GIVEN[:1]
    with pytest.raises(StagingFailed, match="NETRC") as caught:
        stage(vault, tmp_path, order())
    assert caught.value.reason == Reason.SECRET_MISSING


def test_a_server_cannot_set_other_variables(vault: Vault, source: Source, tmp_path: Path) -> None:
    source.secrets = (*GIVEN, JobSecret(variable="LD_PRELOAD", value="/evil.so"))
    run_dir = stage(vault, tmp_path, order())
    assert b"LD_PRELOAD" not in run_dir.secrets.read_bytes()


def told(vault: Vault, run_dir: RunDir, *, is_over: bool = False, offset: int = 0) -> bytes:
    return vault.read(order(), run_dir.path, "log", offset, 10_000, is_over=is_over).data


def test_streams_and_words_are_hidden_and_the_file_too(vault: Vault, tmp_path: Path) -> None:
    run_dir = stage(vault, tmp_path, order())
    log = run_dir.stream("log")
    text = f"it is {VALUE}, in a file: password hunter2hunter2\nand {VALUE[:6]}".encode()
    log.write_bytes(text)
    first = told(vault, run_dir)
    assert first.startswith(b"it is **************, in a file: ") and first.endswith(b"\nand ")
    assert VALUE.encode() not in log.read_bytes(), "once it was seen, it is not in the file either"
    with log.open("ab") as more:
        more.write(VALUE[6:].encode())
    rest = told(vault, run_dir, offset=len(first))
    assert rest == b"*" * len(VALUE.encode())
    assert len(first + rest) == log.stat().st_size
    report = JobReport(
        job_id=JOB,
        state=JobState.FAILED,
        detail=f"no {VALUE}",
        pending_reason=VALUE,
        outputs=(Output(path=f"a/{VALUE}", size_bytes=1),),
    )
    said = vault.hide(order(), run_dir.path, report)
    assert VALUE not in str(said) and said.detail.startswith("no ***")


def test_after_a_restart_the_files_say_what_to_hide(source: Source, vault: Vault, tmp_path: Path) -> None:
    run_dir = stage(vault, tmp_path, order())
    run_dir.stream("log").write_bytes(f"{VALUE} password hunter2hunter2\n".encode())
    source.asked.clear()
    again = Vault(cast(Link, source))
    assert set(told(again, run_dir)) == set(b"* \n")
    assert not source.asked


def test_after_a_restart_the_server_says_what_to_hide_in_a_job_that_is_over(
    source: Source, vault: Vault, tmp_path: Path
) -> None:
    run_dir = stage(vault, tmp_path, order())
    run_dir.stream("log").write_bytes(f"said {VALUE}\n".encode())
    clear(run_dir)  # as job.sh does at its end
    again = Vault(cast(Link, source))
    source.error = ServerUnreachable("away")
    piece = again.read(order(), run_dir.path, "log", 0, 10_000, is_over=True)
    assert (piece.data, piece.is_end) == (b"", False), "nothing is shown that might have to be hidden"
    source.error = None
    assert told(again, run_dir, is_over=True) == b"said **************\n"


@pytest.mark.parametrize("gone", [True, False])
def test_values_that_nobody_knows_any_more_hide_all_that_is_left(
    source: Source, vault: Vault, tmp_path: Path, gone: bool
) -> None:
    run_dir = stage(vault, tmp_path, order())
    run_dir.stream("log").write_bytes(f"said {VALUE}\n".encode())
    clear(run_dir)
    again = Vault(cast(Link, source))
    if gone:
        source.error = NotFound("gone")
    else:  # its user has set another value meanwhile
        source.secrets = (replace(GIVEN[0], value="another-value", version="sec_1@2"), GIVEN[1])
    shown = told(again, run_dir, is_over=True)
    assert set(shown) == set(b"*\n") and len(shown) == run_dir.stream("log").stat().st_size
    assert VALUE.encode() not in everything(run_dir.path)


def test_the_end_of_a_job_removes_them_and_still_hides(vault: Vault, tmp_path: Path) -> None:
    run_dir = stage(vault, tmp_path, order())
    result = JobReport(job_id=JOB, state=JobState.SUCCEEDED, detail=f"{VALUE}")
    assert VALUE not in vault.end(order(), run_dir.path, result).detail
    assert not run_dir.secrets.exists() and not run_dir.secret_files.exists()
    run_dir.stream("log").write_bytes(VALUE.encode())
    run_dir.stream("metrics").write_bytes(f'{{"x": "{VALUE}"}}\n'.encode())
    assert VALUE.encode() not in told(vault, run_dir, is_over=True)
    # What was never told (nobody wanted it) is made harmless when the job is let go.
    vault.forget(order(), run_dir.path, {})
    assert VALUE.encode() not in everything(run_dir.path)


def test_what_a_crash_left_is_swept(source: Source, vault: Vault, tmp_path: Path) -> None:
    run_dir = stage(vault, tmp_path, order())
    run_dir.stream("log").write_bytes(VALUE.encode())
    jobs = run_dir.path.parent
    vault.sweep(jobs, [(order(), False)])
    assert run_dir.secrets.exists(), "it runs"
    again = Vault(cast(Link, source))
    source.asked.clear()
    again.sweep(jobs, [(order(), True)])
    assert not run_dir.secrets.exists() and not run_dir.secret_files.exists()
    assert set(told(again, run_dir, is_over=True)) == set(b"*") and not source.asked
    stranger = stage(vault, tmp_path, order())
    Vault().sweep(jobs, [])
    assert not stranger.secrets.exists(), "of a job that nobody knows"


def test_the_owner_of_an_endpoint_may_forbid_them() -> None:
    assert not parse_policy({}).refusal(order())
    assert "allow_secrets = false" in parse_policy({"allow_secrets": False}).refusal(order())
    assert "denied_envs names TOKEN" in parse_policy({"denied_envs": ["TOK*"]}).refusal(order())
    assert "allowed_envs does not name" in parse_policy({"allowed_envs": ["A"]}).refusal(order())
