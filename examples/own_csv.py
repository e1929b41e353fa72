"""A CSV with strings, from end to end, by a config file: own_csv.toml next to it has all settings.

    python examples/own_csv.py

makes up a log of clicks in a folder of its own, and then does there what one would type:

    monolith train --config own_csv.toml
    monolith evaluate --config own_csv.toml --checkpoint best
    monolith predict --config own_csv.toml --checkpoint best --columns user,item --to predictions.csv

Users like one genre each, and click on it four times of five; on others once in five.
"""

import os
import random
import tempfile
from pathlib import Path

from monolith.cli.main import main

CONFIG = Path(__file__).with_suffix(".toml").resolve()
GENRES = ["drama", "comedy", "noir", "western"]


def write_clicks(path: Path, many: int) -> None:
    rng = random.Random(1)
    lines = ["user,item,tags,seen,price,age,time,click"]
    for n in range(many):
        user, tags = rng.randrange(200), rng.sample(GENRES, rng.randrange(1, 4))
        seen = "|".join(str(rng.randrange(300)) for _ in range(rng.randrange(8)))
        click = int(rng.random() < (0.8 if GENRES[user % 4] in tags else 0.2))
        lines.append(
            f"{user:05d},{rng.randrange(300)},{'|'.join(tags)},{seen},{rng.expovariate(0.1):.2f},"
            f"{rng.randrange(16, 70)},{1_700_000_000 + n},{click}"
        )
    path.write_text("\n".join(lines) + "\n")


def run(command: str) -> None:
    print(f"$ monolith {command}", flush=True)
    status = main(command.split())
    assert status == 0, status


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    write_clicks(Path("clicks.csv"), 8_000)
    run(f"train --config {CONFIG} --quiet")
    run(f"evaluate --config {CONFIG} --checkpoint best --quiet")
    run(f"predict --config {CONFIG} --checkpoint best --columns user,item --to predictions.csv --quiet")
    print("\n".join(Path("predictions.csv").read_text().splitlines()[:4]))
