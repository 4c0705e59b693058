"""The documents tell the truth about the code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_path_named_in_architecture_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:src|docs|tests|benchmarks|examples)/[\w./-]+)`", text))
    assert len(named) > 25
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


def test_every_picture_and_file_that_documents_point_at_exists() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    missing, pictures = [], set()
    for document in documents:
        # Code between fences shows links of other people's files, too.
        text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
        for mark, words, target in re.findall(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:|#", target):
                continue
            path = (document.parent / target.partition("#")[0]).resolve()
            if mark:
                pictures.add(path)
            if not path.exists() or (mark and not words.strip()):
                missing.append(f"{document.relative_to(ROOT)}: {target} ({words})")
    assert not missing
    # What nobody shows is weight in every copy of the repository.
    assert not [path for path in (ROOT / "docs" / "pictures").iterdir() if path not in pictures]


def test_every_fault_point_is_passed_somewhere() -> None:
    from diamond.core import faults

    points = faults.FAULT_POINTS + faults.ENROLMENT_FAULT_POINTS + faults.SLURM_FAULT_POINTS
    points += faults.IMAGE_FAULT_POINTS + faults.NOTICE_FAULT_POINTS + faults.CURVE_FAULT_POINTS

    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert not [name for name in points if f'fault_point("{name}")' not in source]
    used = set(re.findall(r'fault_point\("([^"]+)"\)', source))
    assert used == set(points)


# The launcher must work alone in job directories, so it cannot be split further.
MAY_BE_LONGER = {"src/diamond/train/launch.py": 800}


def test_no_file_has_grown_past_owning_one_thing() -> None:
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("testing/**/*.py")]:
        limit = MAY_BE_LONGER.get(str(path.relative_to(ROOT)), 600)
        assert len(path.read_text().splitlines()) <= limit, f"{path} is too long: what does it own?"
