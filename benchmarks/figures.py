"""Draw the plots of the documentation from benchmarks/results, and the README's table. No plotting library.

.venv/bin/python benchmarks/figures.py
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "figures"
MARK = re.compile(r"<!-- figures -->.*?(?:<!-- /figures -->|\Z)", re.DOTALL)
WIDTH, BAR, GAP, LABEL = 720, 26, 12, 230

# Where a benchmark has many figures with peers: those worth a picture.
PICTURES = {
    "images": re.compile(
        r"cold build|last step changed|second site, copied|.*: whole time, simulated typing included|.*: commands typed"
    ),
    "slurm": re.compile(
        r"launch to first output seen p50|submits a second|\d+ short tasks, end to end|queries a minute.*"
    ),
    "web": re.compile(r"tasks, cold: (KiB|time to the first row)"),
    "train_walltime": re.compile(r"lost at a boundary with.*|steps computed twice.*worst|wall time of the training"),
    "optim_training": re.compile(r".*: to AdamW's error, wall seconds"),
    "optim_compression": re.compile(r"step over .*: Diamond powersgd:32:int8"),
    "train_overhead_gpu": re.compile(r"GPU, 10 GiB: training held up by a checkpoint"),
    "scheduling": re.compile(r"(pollux-6|philly-1|log-8000): mean completion"),
}
# Where there are too many for the README's table: those that are in it.
TABLED = {"scheduling": re.compile(r"decision: .*|.*: (mean completion.*|makespan)")}


def compared(figure: dict[str, Any]) -> dict[str, float]:
    return {"diamond": figure["value"], **figure["peer"]}


def bars(figure: dict[str, Any], title: str) -> str:
    """A bar for Diamond and one for each peer, each with its number: readable in light and dark pages."""
    rows = compared(figure)
    top = max(rows.values())
    unit = escape(figure["unit"])
    height = 60 + len(rows) * (BAR + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="14" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="16" y="30" font-size="16" font-weight="bold" fill="#1f2933">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(rows.items()):
        y = 48 + number * (BAR + GAP)
        length = max(2.0, (WIDTH - LABEL - 110) * value / top)
        colour = "#2563c9" if name == "diamond" else "#a3b1c2"
        parts += [
            f'<text x="{LABEL - 10}" y="{y + 18}" text-anchor="end" fill="#1f2933">{escape(name)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3" fill="{colour}"/>',
            f'<text x="{LABEL + length + 8:.1f}" y="{y + 18}" fill="#1f2933">{value:.3g} {unit}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def table(document: dict[str, Any]) -> str:
    machine, lines = document["machine"], ["| figure | measured | aim | peers, same run |", "|---|---|---|---|"]
    tabled = TABLED.get(document["benchmark"])
    shown = [one for one in document["figures"] if tabled is None or tabled.fullmatch(one["name"])]
    for figure in shown:
        aim = "" if figure["aim"] is None else f"{'<' if figure['better'] == 'lower' else '≥'} {figure['aim']:g}"
        missed = " (missed)" if figure["holds"] is False else ""
        peers = ", ".join(f"{name}: {value:.3g}" for name, value in figure["peer"].items())
        lines.append(f"| {figure['name']} | {figure['value']:.3g} {figure['unit']}{missed} | {aim} | {peers} |")
    where = f"{machine['cores']} cores, {document['at'][:10]}, Python {document['versions']['python']}"
    if "device" in document["versions"]:
        where += f", {document['versions']['device']}, torch {document['versions']['torch']}"
    if "slurm" in document["versions"]:
        where += f", Slurm {document['versions']['slurm']}"
    absent = "".join(f"\n\nNot measured: {name} ({why})." for name, why in document.get("absent", {}).items())
    if len(shown) < len(document["figures"]):
        absent += (
            f"\n\n{len(document['figures']) - len(shown)} more in `benchmarks/results/{document['benchmark']}.json`."
        )
    script = document.get("script") or document["benchmark"].removesuffix("_gpu").removesuffix("_cpu")
    return f"`benchmarks/{script}.py` ({where}):\n\n" + "\n".join(lines) + absent


def main() -> None:
    PLOTS.mkdir(exist_ok=True)
    sections = []
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        sections.append(table(document))
        for figure in document["figures"]:
            wanted = PICTURES.get(document.get("script") or document["benchmark"])
            if set(figure["peer"]) - {"python -c pass"} and (wanted is None or wanted.fullmatch(figure["name"])):
                slug = re.sub(r"[^a-z0-9]+", "-", f"{document['benchmark']}-{figure['name']}".lower()).strip("-")
                better = f"{figure['better']} is better"
                (PLOTS / f"{slug}.svg").write_text(bars(figure, f"{figure['name']} ({figure['unit']}; {better})"))
    readme = ROOT / "README.md"
    body = "<!-- figures -->\n" + "\n\n".join(sections) + "\n<!-- /figures -->"
    readme.write_text(MARK.sub(lambda _: body, readme.read_text(), count=1))


if __name__ == "__main__":
    main()
