"""Images of Diamond against Apptainer by hand: builds, copies, and the way to a first successful run.

    .venv/bin/python -m benchmarks.images [--quick] [--check]

Needs what `testing/minihpc` needs (Linux, root, namespaces) with Apptainer, and a way to Debian's and Python's package
indexes. Two centres run at once, each with its own Slurm; nothing else should use the machine meanwhile. The whole
takes most of an hour; --quick does everything once, in about a quarter of one.

Builds: both ways start from the same base image on the same disk, reach packages through the same proxy and take
turns. `equal.def` installs what the recipe does; that the packages are the same is checked, not assumed.

Journeys: a person wants a program to run at a centre where its data are. Every command of both ways is really run and
timed, what its jobs waited in Slurm's queue is taken off, and what is typed is counted. How long typing takes is
simulated: so many characters at a stated speed, and no time to think or to read in either way. A figure that contains
it says so, and each has one beside it that does not. Every step with its time goes to `results/raw/images.json`.

By hand there is more than one way to a colleague's environment. All are taken: to write everything anew, to rebuild
from the definition, to copy the finished file. The aims are about the first, which is what people who share nothing
do; what is left against the quickest is given beside it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import RESULTS, Bench, median, options
from benchmarks.images_diamond import Installation, WithDiamond
from benchmarks.images_manual import BUILD_WITHIN_S, ByHand
from benchmarks.images_site import Centre
from benchmarks.images_steps import CHARACTERS_A_SECOND, WORDS_A_MINUTE, Diary, WayLost
from benchmarks.images_workloads import FOLDER, WORKLOADS, Workload
from testing.minihpc import available

BARE, BARE_ZSTD = "apptainer build", "apptainer build, zstd"
# What Diamond's own builder packs with; Apptainer's default is gzip.
_ZSTD = ("--mksquashfs-args", "-comp zstd -Xcompression-level 6")
SCRATCH, REBUILT, COPIED = "by hand, from scratch", "by hand, from the definition", "by hand, .sif copied"
FIRST, SECOND, COLLABORATOR = "first time", "second site", "collaborator"
_PACKAGES = "dpkg-query -W -f '${Package} ${Version}\\n'; pip list --format=freeze"


class Run:
    """One run of the benchmark."""

    def __init__(self, bench: Bench, installation: Installation, folder: Path, quick: bool) -> None:
        self.bench = bench
        self.installation = installation
        self.alpha, self.beta = installation.alpha, installation.beta
        self.folder = folder
        self.repetitions = 1 if quick else 3
        self.diaries: dict[tuple[str, str, str], list[Diary]] = {}  # by workload, situation and way

    # Builds

    def builds(self) -> None:
        cold = self.folder / "cold"
        shutil.copytree(FOLDER / "cold", cold)
        definition = (cold / "equal.def").read_text()
        self.alpha.site.write("/home/user1/equal.def", definition)
        runs: dict[str, list[float]] = {"diamond": [], BARE: [], BARE_ZSTD: []}
        hits: list[float] = []
        for number in range(self.repetitions):
            runs[BARE].append(self._bare("equal.def"))
            self.installation.forget_images()
            runs["diamond"].append(self._diamond(cold, "image build cold.yaml --infra alpha", says="ready"))
            if number == 0:
                self._check_equal()
                hits = [self._diamond(cold, "image build cold.yaml --infra alpha") for _ in range(5)]
            runs[BARE_ZSTD].append(self._bare("equal.def", *_ZSTD))
        values = {name: median(found) for name, found in runs.items()}
        own = values.pop("diamond")
        self.bench.add(
            "cold build", own, "s", "lower", peer=_rounded(values), runs=_few(runs["diamond"]),
            peer_runs={name: _few(runs[name]) for name in values},
            note="`diamond image build` until it returns, lock, SBOM and validation included; nothing kept from before",
        )  # fmt: skip
        self.bench.add(
            "cold build, times apptainer build", own / values[BARE], "x", "lower", aim=1.05,
            peer={BARE_ZSTD: round(values[BARE_ZSTD] / values[BARE], 3)},
        )  # fmt: skip
        self.bench.add(
            "cold build, times apptainer build with the same compression", own / values[BARE_ZSTD], "x", "lower"
        )
        self.bench.add("same recipe again", median(hits), "s", "lower", aim=2.0, runs=_few(hits))
        self._last_step(cold, definition)
        self._second_site(cold)

    def _last_step(self, cold: Path, definition: str) -> None:
        recipe = (cold / "cold.yaml").read_text()
        runs: dict[str, list[float]] = {"diamond": [], BARE: []}
        for number in range(self.repetitions):
            line = f"echo {number} > /opt/last-step"
            self.alpha.site.write(
                "/home/user1/changed.def", _insert(definition, "/opt/numpy-version\n", f"    {line}\n")
            )
            runs[BARE].append(self._bare("changed.def"))
            (cold / "changed.yaml").write_text(_insert(recipe, "/opt/numpy-version\n", f"  {line}\n"))
            runs["diamond"].append(self._diamond(cold, "image build changed.yaml --infra alpha", says="kept"))
        value, bare = median(runs["diamond"]), median(runs[BARE])
        self.bench.add(
            "last step changed", value, "s", "lower", peer={BARE: round(bare, 4)}, runs=_few(runs["diamond"]),
            peer_runs={BARE: _few(runs[BARE])}, note="by hand there is nothing to go on from: all is done again",
        )  # fmt: skip

    def _second_site(self, cold: Path) -> None:
        copies, rebuilds = [], []
        for _ in range(self.repetitions):
            copies.append(self._diamond(cold, "image copy cold --to beta"))
            self._forget_at_beta(cold)
            rebuilds.append(self._diamond(cold, "image build cold.yaml --infra beta --fresh"))
            self._forget_at_beta(cold)
        value, other = median(copies), median(rebuilds)
        with self.installation.user1.client() as client:
            size = max(each.facts.size_bytes for each in client.images.get("cold").replicas if each.facts)
        self.bench.add(
            "second site, copied", value, "s", "lower", peer={"built there": round(other, 4)}, runs=_few(copies),
            peer_runs={"built there": _few(rebuilds)}, note=f"{size / 1e6:.0f} MB through the server, digest checked",
        )  # fmt: skip

    def _forget_at_beta(self, cold: Path) -> None:
        self._diamond(cold, "image rm cold --infra beta --yes")
        self.installation.forget_layers(self.beta, self.installation.user1)

    def _bare(self, definition: str, *extra: str) -> float:
        argv = ["apptainer", "build", "--force", *extra, "bare.sif", definition]
        began = time.monotonic()
        self.alpha.site.run(argv, env=self.alpha.login_env, timeout=BUILD_WITHIN_S)
        return time.monotonic() - began

    def _diamond(self, cwd: Path, line: str, *, says: str = "") -> float:
        began = time.monotonic()
        done = self.installation.user1.run(line.split(), cwd)
        took = time.monotonic() - began
        if done.returncode != 0 or says not in done.stdout + done.stderr:
            raise WayLost(f"diamond {line}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return took

    def _check_equal(self) -> None:
        """Both built the same: package for package, version for version."""
        with self.installation.user1.client() as client:
            path = next(each.facts.path for each in client.images.get("cold").replicas if each.facts)
        said = []
        for image in ("bare.sif", path):
            argv = ["apptainer", "--silent", "exec", "--cleanenv", image, "sh", "-c", _PACKAGES]
            said.append(set(self.alpha.site.run(argv).stdout.splitlines()))
        if said[0] != said[1]:
            raise WayLost(f"the images differ: {sorted(said[0] ^ said[1])[:20]}")

    # Journeys

    def journeys(self) -> None:
        for number in range(self.repetitions):
            for workload in WORKLOADS:
                ways: list[Callable[[Workload], None]] = [self._by_hand, self._with_diamond]
                for way in ways if number % 2 == 0 else reversed(ways):
                    way(workload)
        for situation in (FIRST, SECOND, COLLABORATOR):
            self._situation(situation)
        self._without_mistakes()

    def _by_hand(self, workload: Workload) -> None:
        desk = self._desk("hand", workload)
        hand = ByHand(workload, self.alpha, self.beta, desk)
        self._note(workload, FIRST, SCRATCH, hand.first_time)
        for rebuild, way in ((False, COPIED), (True, REBUILT)):
            self._note(workload, SECOND, way, lambda: hand.second_site(rebuild=rebuild))  # noqa: B023
            self._note(workload, COLLABORATOR, way, lambda: hand.collaborator(rebuild=rebuild))  # noqa: B023

    def _with_diamond(self, workload: Workload) -> None:
        self._desk("diamond/user1", workload)
        diamond = WithDiamond(workload, self.installation, self.folder / "diamond")
        self._note(workload, FIRST, "diamond", diamond.first_time)
        self._note(workload, SECOND, "diamond", diamond.second_site)
        self._note(workload, COLLABORATOR, "diamond", diamond.collaborator)

    def _desk(self, name: str, workload: Workload) -> Path:
        """A fresh copy of the program's folder on a machine of the user's own."""
        target = self.folder / name / workload.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(workload.folder, target, ignore=shutil.ignore_patterns("__pycache__"))
        return target.parent

    def _note(self, workload: Workload, situation: str, way: str, journey: Callable[[], Diary]) -> None:
        print(f"  {workload.name}, {situation}, {way}:", flush=True)
        self.diaries.setdefault((workload.name, situation, way), []).append(journey())

    def _sums(self, situation: str, way: str, of: Callable[[Diary], float]) -> list[float]:
        """All workloads together, for each repetition."""
        each = [self.diaries[workload.name, situation, way] for workload in WORKLOADS]
        return [sum(of(diary) for diary in diaries) for diaries in zip(*each, strict=True)]

    def _situation(self, situation: str) -> None:
        ways = (
            [(FIRST, SCRATCH)] if situation == FIRST else [(FIRST, SCRATCH), (situation, REBUILT), (situation, COPIED)]
        )
        kinds: list[tuple[str, str, Callable[[Diary], float]]] = [
            ("whole time, simulated typing included", "s", lambda diary: diary.total_s),
            ("wall time without queue wait and typing", "s", lambda diary: diary.wall_s),
            ("typing, simulated", "s", lambda diary: diary.typing_s),
            ("commands typed", "commands", lambda diary: diary.commands),
            ("characters typed", "characters", lambda diary: diary.characters),
        ]
        for what, unit, of in kinds:
            own = self._sums(situation, "diamond", of)
            others = {way: self._sums(where, way, of) for where, way in ways}
            self.bench.add(
                f"{situation}: {what}", median(own), unit, "lower", runs=_few(own),
                peer={way: round(median(found), 2) for way, found in others.items()},
                peer_runs={way: _few(found) for way, found in others.items()},
                note=f"{len(WORKLOADS)} workloads together" + (f"; {_TYPING}" if "typing" in what else ""),
            )  # fmt: skip
            if unit == "s" and what != "typing, simulated":
                self._less(f"{situation}: {what}", situation, median(own), others)

    def _less(self, what: str, situation: str, own: float, others: dict[str, list[float]]) -> None:
        aim = 70.0 if situation == FIRST else 90.0
        values = {way: median(found) for way, found in others.items()}
        quickest = min(values, key=lambda way: values[way])
        for way in dict.fromkeys((SCRATCH, quickest)):
            less = 100 * (1 - own / values[way])
            self.bench.add(f"{what}, less than {way}", less, "%", "higher", aim=aim if way == SCRATCH else None)

    def _without_mistakes(self) -> None:
        """What is left of it when nobody ever forgets anything."""
        own = median(self._sums(FIRST, "diamond", lambda diary: diary.without_mistakes().total_s))
        hand = median(self._sums(FIRST, SCRATCH, lambda diary: diary.without_mistakes().total_s))
        only_hand = median(self._sums(FIRST, SCRATCH, lambda diary: diary.total_s))
        self.bench.add(
            f"{FIRST}: whole time, less than by hand when nobody errs", 100 * (1 - own / hand), "%", "higher",
            note=f"{_TYPING}; with mistakes by hand and none with Diamond: {100 * (1 - own / only_hand):.1f} %",
        )  # fmt: skip

    def write_steps(self) -> None:
        """Every step of every journey, as it was taken."""
        journeys = [
            {
                "workload": workload,
                "situation": situation,
                "way": way,
                "steps": [step.to_json() for step in diary.steps],
            }
            for (workload, situation, way), diaries in self.diaries.items()
            for diary in diaries
        ]
        document = {"words_a_minute": WORDS_A_MINUTE, "characters_a_second": CHARACTERS_A_SECOND, "journeys": journeys}
        target = RESULTS / "raw" / "images.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(document, indent=1) + "\n")


_TYPING = f"typing is simulated: {WORDS_A_MINUTE} words a minute, {CHARACTERS_A_SECOND:.1f} characters a second"


def _insert(text: str, after: str, inserted: str) -> str:
    if text.count(after) != 1:
        raise WayLost(f"{after!r} is not there exactly once:\n{text}")
    return text.replace(after, after + inserted)


def _few(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def versions(centre: Centre) -> dict[str, Any]:
    return {"slurm": centre.site.facts.slurm, "apptainer": centre.site.facts.apptainer or ""}


def main() -> int:
    chosen = options(__doc__ or "")
    if reason := available():
        print(f"cannot be measured here: {reason}")
        return 2
    bench = Bench("images", packages=("diamond-hpc",))
    with (
        tempfile.TemporaryDirectory(prefix="bench-images-") as name,
        Centre.alpha() as alpha,
        Centre.beta() as beta,
    ):
        if alpha.site.facts.apptainer is None:
            print(f"cannot be measured here: {'; '.join(alpha.site.facts.warnings)}")
            return 2
        alpha.offer_base()
        beta.offer_base(alpha)
        folder = Path(name)
        with Installation(alpha, beta, folder / "homes") as installation:
            run = Run(bench, installation, folder, chosen.quick)
            run.builds()
            run.journeys()
        bench.versions = versions(alpha)
        if not chosen.quick or chosen.keep:
            run.write_steps()
    return bench.finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
