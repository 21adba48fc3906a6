"""Align a folder of Hugging Face with preferences: trl's `DPOTrainer` on this engine.

    torchrun --nproc-per-node 2 examples/dpo.py MODEL DATA.jsonl OUTPUT [--lora 16] [--beta 0.1]

A row of the data has `prompt`, `chosen` and `rejected`, as texts or as messages. The rest is as in examples/sft.py.
"""

import datasets
import trl
from sft import adapters, arguments, load, parser, run, train


def main() -> None:
    """Train on preferences."""
    options = parser(__doc__)
    options.add_argument("--beta", type=float, default=0.1, help="how close the policy stays to the model it began as")
    given = options.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(given.model)
    files = {"train": given.data} | ({"test": given.eval_data} if given.eval_data else {})
    data = datasets.load_dataset("json", data_files=files)
    trainer = trl.DPOTrainer(
        model,
        # The policy as it began is asked once for all rows, so that no second model is kept.
        args=arguments(trl.DPOConfig, given, beta=given.beta, precompute_ref_log_probs=True),
        train_dataset=data["train"],
        eval_dataset=data.get("test"),
        processing_class=tokenizer,
        peft_config=adapters(given.lora),
    )
    train(trainer, given.output)


if __name__ == "__main__":
    run(main)
