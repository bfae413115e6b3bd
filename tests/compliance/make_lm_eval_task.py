"""A task for lm-eval from the project's own texts: 200 contexts with continuations, as JSON lines.

    python tests/compliance/make_lm_eval_task.py FOLDER

writes items.jsonl and local_text.yaml, for `lm_eval --include_path FOLDER --tasks local_text`.
"""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TASK = """task: local_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
target_delimiter: " "
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
"""


def main(folder: str, count: int = 200) -> None:
    chance = random.Random(4)
    paths = [ROOT / "README.md", *sorted((ROOT / "core").glob("*.py"))]
    words = " ".join(path.read_text() for path in paths).split()
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "items.jsonl", "w") as items:
        for _ in range(count):
            start, length = chance.randrange(len(words) - 60), chance.randint(3, 40)
            cut = start + length
            item = {
                "context": " ".join(words[start:cut]),
                "continuation": " ".join(words[cut : cut + chance.randint(1, 6)]),
            }
            items.write(json.dumps(item) + "\n")
    (place / "local_text.yaml").write_text(TASK.format(path=place.resolve() / "items.jsonl"))


if __name__ == "__main__":
    main(*sys.argv[1:])
