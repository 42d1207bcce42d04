"""Make the data and the base model of the arithmetic task, unless they are there already."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training import Recipe

HERE = Path(__file__).parent
# Written with the rest before the folder gets its name: where it is, everything is.
RECORD = "made.json"
# Of what a build consists of; an older one lacks something.
FORMAT = 2
STEPS_PER_LINE = 100


def main() -> None:
    """Read the command line, and make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "build", help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of split, weights and lessons")
    args = parser.parse_args()
    if is_made(args.out, seed=args.seed):
        print(f"arithmetic: {args.out} is complete")
        return
    # Torch takes seconds to import, and most calls end above.
    import torch

    # So small a model is no faster on more, and far slower where other processes want the cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    build(args.out, seed=args.seed)


def is_made(out: Path, *, seed: int) -> bool:
    """Whether `out` holds a complete build with this seed.

    Raises SystemExit if it holds anything else: nothing of a user's is ever overwritten.
    """
    record = out / RECORD
    made = json.loads(record.read_text()) if record.is_file() else {}
    if (made.get("seed"), made.get("format")) == (seed, FORMAT):
        return True
    if out.exists():
        raise SystemExit(
            f"arithmetic: {out} is there, but is not this task (format {FORMAT}) made with seed"
            f" {seed}; remove it or choose another --out"
        )
    return False


def build(out: Path, *, seed: int, recipe: "Recipe | None" = None) -> None:
    """Make everything under a temporary name beside `out`, then give it its name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.partial-") as partial:
        whole = Path(partial) / out.name
        whole.mkdir()
        fill(whole, seed=seed, recipe=recipe)
        whole.rename(out)
    print(f"arithmetic: {out} is made")


def fill(folder: Path, *, seed: int, recipe: "Recipe | None") -> None:
    """Write the rows, the base model, and the record of how they were made."""
    import base_model
    import problems
    import training

    rows = problems.make_rows(seed=seed)
    for name, part in rows.items():
        problems.write_rows(part, folder / name)
    print("arithmetic: " + ", ".join(f"{len(part)} {name} rows" for name, part in rows.items()))
    recipe = recipe or training.Recipe()
    tokenizer = base_model.make_tokenizer()
    model = base_model.make_untrained(tokenizer, seed=seed)
    report(training.train(model, tokenizer, rows["train"], recipe, seed=seed))
    texts = training.texts(rows["train"], tokenizer, recipe, seed=seed)
    problems.write_rows([{"text": text} for text in texts], folder / "pretrain")
    base_model.save(model, tokenizer, folder / "base_model")
    pass_rates = {
        name: training.pass_rate(model, tokenizer, part[: problems.NUM_EVAL])
        for name, part in rows.items()
    }
    print(f"arithmetic: pass@1 of the base model: {pass_rates}")
    record = {"format": FORMAT, "seed": seed, "recipe": asdict(recipe), "pass_rates": pass_rates}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def report(losses: Iterator[float]) -> None:
    """Run the training these losses come from, with a line now and then."""
    start_s = time.monotonic()
    for step, loss in enumerate(losses, 1):
        if step % STEPS_PER_LINE == 0:
            seconds = time.monotonic() - start_s
            print(f"arithmetic: step {step}, loss {loss:.2f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
