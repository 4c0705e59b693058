"""What every builder promises, tried on each for real (`conftest.STARTERS`)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import signal
from pathlib import Path

import pytest

from diamond.core import images
from diamond.core.images import Lock, Package
from testing.builders import VALUE, BuilderBench, Job
from testing.waiting import eventually

# Text that would do harm, or be changed, if anything but the shell it is meant for ever read it.
COMMANDS = r"""OUT="${DIAMOND_IMAGE_ROOT:-}/opt/hostile"; mkdir -p "${OUT%/*}"
cat > "$OUT.none" <<'EOF'
%post
    exit 7
%files
EOF
#!/bin/false
x='$(touch /hacked)'; y="\\n\t'"
cat > "$OUT" <<'EOF'
%environment
$HOME `id` $(id) \\ "double" 'single' !history ${UNSET:-default}
RUN COPY FROM
	tab	and trailing blanks@@@
EOF
cat >> "$OUT" << __END__
$x $y
__END__
""".replace("@", " ")
WRITTEN = (
    "%environment\n$HOME `id` $(id) \\\\ \"double\" 'single' !history ${UNSET:-default}\nRUN COPY FROM\n"
    "\ttab\tand trailing blanks   \n$(touch /hacked) \\n\\t'"
)


def read(bench: BuilderBench, job: Job, path: str) -> str:
    """A file of the image; in a virtual environment files lie below a folder of their own."""
    return bench.inside(job.facts, "/bin/sh", "-c", 'cat "${DIAMOND_IMAGE_ROOT:-}$1"; echo .', "sh", path)[:-1]


def test_everything_of_a_recipe_is_in_the_image(bench: BuilderBench, built: Job) -> None:
    said = bench.inside(built.facts, "/bin/sh", "-c", 'printf "%s|%s" "$GREETING" "${EMPTY-unset}"')
    assert said == f"{VALUE}|"
    assert read(bench, built, "/opt/made/by") == VALUE
    assert read(bench, built, "/opt/given/data.txt") == "given\n"
    assert bench.inside(built.facts, "python3", "-c", "import six; print(six.__version__)").strip() == "1.16.0"
    assert "six is 1.16.0" in built.log  # of the validation
    assert built.states == dict.fromkeys(("base", "pip", "commands", "pack", "test"), "done")


def test_what_is_said_of_an_image_is_true(bench: BuilderBench, built: Job) -> None:
    facts = built.facts
    assert facts.builder == bench.builder and facts.builder_version
    assert facts.architecture == platform.machine()
    assert facts.size_bytes > 0 and facts.seconds > 0
    assert built.lock.of_kind("pip")["six"] == "1.16.0"
    assert facts.num_packages == len(built.lock.packages) > 1
    version = bench.inside(facts, "python3", "-c", "import platform; print(platform.python_version())")
    assert facts.python == built.lock.python == version.strip()
    kept = bench.outside(f"{bench.root}/store/{facts.image_id}")
    assert (kept / images.FACTS_FILE).read_bytes() == (built.folder / images.FACTS_FILE).read_bytes()
    if bench.suffix == "image.sif":
        assert facts.digest == "sha256:" + hashlib.sha256((kept / bench.suffix).read_bytes()).hexdigest()
    sbom = json.loads((built.folder / images.SBOM_FILE).read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    assert any(part["name"] == "six" and part["version"] == "1.16.0" for part in sbom["components"])
    assert "six==1.16.0" in (built.folder / images.DEFINITION_FILE).read_text()


def test_a_build_leaves_only_its_image_and_layers(bench: BuilderBench, built: Job) -> None:
    assert bench.listed("tmp") == []
    assert built.facts.image_id in bench.listed("store")
    assert set(bench.listed(f"store/{built.facts.image_id}")) == {bench.suffix, images.FACTS_FILE, images.LOCK_FILE}


def test_settings_of_the_endpoint_stay_out_of_the_image(bench: BuilderBench, built: Job) -> None:
    variables = bench.inside(built.facts, "env")
    for word in ("http_proxy", "PIP_CERT", "SSL_CERT_FILE", "PYTHONPATH", "APT_CONFIG"):
        assert f"\n{word}=" not in f"\n{variables}"


def test_a_changed_last_step_keeps_the_others(bench: BuilderBench, built: Job) -> None:
    before = bench.traffic_bytes
    commands = 'mkdir -p "${DIAMOND_IMAGE_ROOT:-}/opt"\necho other > "${DIAMOND_IMAGE_ROOT:-}/opt/other"\n'
    job = bench.build(bench.recipe(pip=["six==1.16.0"], build=commands))
    assert job.states["base"] == job.states["pip"] == "kept"
    assert job.states["commands"] == job.states["pack"] == "done"
    assert bench.traffic_bytes == before
    assert read(bench, job, "/opt/other") == "other\n"
    # The layer it was built on is as it was: what the first image's commands made is not in it.
    seen = bench.inside(job.facts, "/bin/sh", "-c", 'ls "${DIAMOND_IMAGE_ROOT:-}/opt"').split()
    assert set(seen) - {"diamond"} == {"other"}
    assert read(bench, built, "/opt/made/by") == VALUE


def test_kept_layers_are_not_used_when_a_fresh_build_is_asked_for(bench: BuilderBench, built: Job) -> None:
    before = bench.traffic_bytes
    job = bench.build(bench.recipe(pip=["six==1.16.0"]), fresh=True)
    assert "kept" not in job.states.values()
    assert bench.traffic_bytes > before or not before


def test_a_fresh_build_is_used_and_kept(bench: BuilderBench) -> None:
    recipe = bench.recipe(build='sleep 1\ndate +%s%N > "${DIAMOND_IMAGE_ROOT:-}/made-at"\n', envs={"OF": "fresh"})
    first = bench.build(recipe)
    fresh = bench.build(recipe, fresh=True)
    assert read(bench, fresh, "/made-at") > read(bench, first, "/made-at")
    after = bench.build(recipe)
    assert after.states["commands"] == "kept"
    assert read(bench, after, "/made-at") == read(bench, fresh, "/made-at")


def test_commands_reach_the_shell_byte_for_byte(bench: BuilderBench) -> None:
    job = bench.build(bench.recipe(build=COMMANDS))
    assert read(bench, job, "/opt/hostile") == f"{WRITTEN}\n"
    said = bench.inside(job.facts, "/bin/sh", "-c", 'test ! -e "${DIAMOND_IMAGE_ROOT:-}/hacked" && echo well')
    assert said.strip() == "well"


def test_an_image_whose_validation_fails_is_none(bench: BuilderBench) -> None:
    job = bench.run(bench.order(bench.recipe(test="true\nif true; then\n  false\nfi\n"), image_id="img_badtest00"))
    assert job.code == 1
    assert job.states["test"] == "failed"
    assert job.failure.stage == "test"
    assert not (job.folder / images.FACTS_FILE).exists()
    assert "img_badtest00" not in bench.listed("store")
    assert bench.listed("tmp") == []


def test_a_failing_command_is_named_by_its_line(bench: BuilderBench) -> None:
    job = bench.run(bench.order(bench.recipe(build="echo one\n\nno-such-program --really\necho never\n")))
    assert job.code == 1
    assert job.failure.stage == "commands"
    assert "no-such-program" in job.failure.line
    assert "never" not in job.log
    assert bench.listed("tmp") == []


def test_a_package_that_does_not_exist_is_named(bench: BuilderBench) -> None:
    job = bench.run(bench.order(bench.recipe(pip=["six==1.16.0", "diamond-there-is-no-such-package==1"])))
    assert job.code == 1
    assert job.failure.stage == "pip"
    assert "diamond-there-is-no-such-package" in job.failure.line
    assert job.failure.hint


def test_exact_versions_are_taken_from_a_lock(bench: BuilderBench) -> None:
    pins = Lock(packages=(Package(kind="pip", name="six", version="1.15.0"),))
    job = bench.build(bench.recipe(pip=["six"]), pins=pins)
    assert job.lock.of_kind("pip")["six"] == "1.15.0"


def slow(mark: str, seconds: str) -> str:
    """Commands that say they have begun and then take very long."""
    return f"echo {mark} has begun\nsleep {seconds}\n"


def never() -> str:
    """How long such commands sleep; no other test on this machine sleeps as long, and its programs are not ours."""
    return f"299.{secrets.randbelow(10**9):09}"


def wait_begun(log: Path, mark: str) -> None:
    def begun() -> bool:
        return f"\n{mark} has begun\n" in log.read_text(errors="replace")

    eventually(begun, within_s=180, what=f"the commands of {mark} begin")


def sleepers(bench: BuilderBench, seconds: str) -> list[tuple[str, ...]]:
    return [argv for argv in bench.processes("sleep") if argv[-2:] == ("sleep", seconds)]


def test_a_killed_build_leaves_nothing_to_be_seen(bench: BuilderBench) -> None:
    seconds = never()
    recipe = bench.recipe(pip=["six==1.16.0"], build=slow("killed", seconds))
    run_dir = bench.prepare(bench.order(recipe, image_id="img_killed000"))
    process = bench.begin(run_dir)
    wait_begun(bench.outside(run_dir) / "log", "killed")
    eventually(lambda: sleepers(bench, seconds), within_s=20, what="its program is seen")
    process.send_signal(signal.SIGKILL)
    assert bench.result(run_dir, process).code != 0
    assert "img_killed000" not in bench.listed("store")
    eventually(lambda: not sleepers(bench, seconds), within_s=20, what="its programs end")
    assert bench.listed("tmp") != []  # a killed process tidies nothing
    again = bench.build(bench.recipe(pip=["six==1.16.0"], build="echo quick\n"), image_id="img_killed000")
    assert again.states["commands"] == "done"
    assert bench.listed("tmp") == []
    assert "img_killed000" in bench.listed("store")


def test_a_build_that_is_told_to_stop_tidies_up(bench: BuilderBench) -> None:
    seconds = never()
    run_dir = bench.prepare(bench.order(bench.recipe(build=slow("stopped", seconds)), image_id="img_stopped00"))
    process = bench.begin(run_dir)
    wait_begun(bench.outside(run_dir) / "log", "stopped")
    eventually(lambda: sleepers(bench, seconds), within_s=20, what="its program is seen")
    process.send_signal(signal.SIGTERM)
    job = bench.result(run_dir, process)
    assert job.code == 128 + signal.SIGTERM, job.log
    assert bench.listed("tmp") == []
    assert "img_stopped00" not in bench.listed("store")
    assert sleepers(bench, seconds) == []
    assert not (job.folder / images.FACTS_FILE).exists()


def test_two_builds_of_the_same_thing_at_once(bench: BuilderBench) -> None:
    recipe = bench.recipe(pip=["six==1.14.0"], test="python3 -c 'import six; assert six.__version__ == \"1.14.0\"'")
    runs = [bench.prepare(bench.order(recipe)) for _ in range(2)]
    jobs = [bench.result(run_dir, process) for run_dir, process in [(run, bench.begin(run)) for run in runs]]
    for job in jobs:
        assert job.code == 0, job.log
        assert bench.inside(job.facts, "python3", "-c", "import six; print(six.__version__)").strip() == "1.14.0"
    assert bench.listed("tmp") == []


def test_an_image_is_a_base(bench: BuilderBench, built: Job) -> None:
    recipe = bench.recipe(base="image:first", envs={"GREETING": "other"}, build="python3 -c 'import six'\n")
    job = bench.build(recipe, base_path=built.facts.path, base_digest=built.facts.digest)
    assert read(bench, job, "/opt/made/by") == VALUE
    assert bench.inside(job.facts, "/bin/sh", "-c", 'printf %s "$GREETING"') == "other"


def test_an_image_travels(bench: BuilderBench, built: Job) -> None:
    sent = bench.run(bench.order(action="export", image_id=built.facts.image_id, digest=built.facts.digest))
    assert sent.code == 0, sent.log
    payload = (sent.folder / images.PAYLOAD_FILE).read_bytes()
    digest = f"sha256:{hashlib.sha256(payload).hexdigest()}"
    elsewhere = f"{bench.folder}/elsewhere"
    work = bench.order(action="import", image_id="img_travelled", digest=digest, facts=built.facts, lock=built.lock)
    taken = bench.run(work, staged={images.PAYLOAD_FILE: payload}, root=elsewhere)
    assert taken.code == 0, taken.log
    assert taken.facts.image_id == "img_travelled"
    assert taken.facts.recipe_digest == built.facts.recipe_digest
    assert taken.lock == built.lock
    program = "import os, six; print(six.__version__, ascii(os.environ['GREETING']))"
    said = bench.inside(taken.facts, "python3", "-c", program, root=elsewhere)
    assert said.strip() == f"1.16.0 {VALUE!a}"

    spoilt = payload[:-5000] + os.urandom(5000)
    work = bench.order(action="import", image_id="img_spoilt000", digest=digest, facts=built.facts)
    bad = bench.run(work, staged={images.PAYLOAD_FILE: spoilt}, root=elsewhere)
    assert bad.code == 1
    assert bad.failure.message
    assert not bench.outside(f"{elsewhere}/store/img_spoilt000").exists()
    assert not any(bench.outside(f"{elsewhere}/tmp").glob("[!.]*"))


def test_a_missing_image_cannot_be_sent(bench: BuilderBench) -> None:
    job = bench.run(bench.order(action="export", image_id="img_notthere0", name="lost"))
    assert job.code == 1
    assert "lost" in job.failure.message


def test_images_and_layers_are_removed(bench: BuilderBench) -> None:
    root = f"{bench.folder}/to-remove"
    layers = bench.outside(f"{root}/layers/{bench.builder}")
    job = bench.run(bench.order(bench.recipe(build="sleep 1; echo made\n")), root=root)
    assert job.code == 0, job.log
    kept = sorted(path.name for path in layers.iterdir())
    assert kept
    spared = bench.run(bench.order(action="prune", image_id="", keep=tuple(kept)), root=root)
    assert spared.code == 0, spared.log
    assert sorted(path.name for path in layers.iterdir()) == kept
    assert bench.run(bench.order(action="prune", image_id=""), root=root).code == 0
    assert list(layers.iterdir()) == []
    assert bench.inside(job.facts, "echo", "here", root=root).strip() == "here"
    for _ in range(2):  # the second time there is nothing to do
        gone = bench.run(bench.order(action="remove", image_id=job.facts.image_id), root=root)
        assert gone.code == 0, gone.log
    assert list(bench.outside(f"{root}/store").iterdir()) == []


@pytest.mark.parametrize("image_id", ["../victim", "", "img_../../x"])
def test_ids_that_are_none_are_refused(bench: BuilderBench, image_id: str) -> None:
    bench.make_folder(f"{bench.root}/victim")
    for action in ("remove", "export"):
        job = bench.run(bench.order(action=action, image_id=image_id))
        assert job.code == 1, job.log
        assert "not the id of an image" in job.failure.message
    assert bench.outside(f"{bench.root}/victim").is_dir()


def test_an_image_larger_than_the_endpoint_allows_is_none(bench: BuilderBench) -> None:
    run_dir = bench.prepare(bench.order(bench.recipe(), image_id="img_toolarge0"))
    path = bench.outside(f"{run_dir}/image-work.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_image_bytes": 1000}))
    job = bench.result(run_dir, bench.begin(run_dir))
    assert job.code == 1
    assert "allows" in job.failure.message
    assert "img_toolarge0" not in bench.listed("store")
