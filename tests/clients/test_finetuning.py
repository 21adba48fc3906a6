"""examples/sft.py and examples/dpo.py on a folder of Hugging Face, by torchrun: what they save is what they trained."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from tests.support.forked_programs import Program, in_folder
from tests.support.on_ranks import fixed_seed
from tests.support.settling import LIMIT_S
from tests.support.source_tree import ROOT
from tests.support.train_program import environment

pytest.importorskip("trl")
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"  # noqa: E501
ANSWER = {"role": "assistant", "content": "one two"}
ASKED = [[{"role": "user", "content": f"count to {number}"}] for number in range(10, 26)]
WORDS = ("--save-steps", "6", "--learning-rate", "1e-2", "--length", "128")


def make_folder(folder: Path) -> None:
    """Save a small model in bfloat16 with a tokenizer of bytes, and files of conversations and preferences."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*letters, "<|end|>", "<pad>"])}
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<|end|>", pad_token="<pad>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, vocab_size=len(vocabulary), pad_token_id=257, eos_token_id=256
    )
    with fixed_seed(0):
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    talks = [{"messages": [*asked, ANSWER]} for asked in ASKED]
    pairs = [{"prompt": asked[0]["content"], "chosen": " one two", "rejected": " no"} for asked in ASKED]
    for name, rows in (("talks", talks), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(example: str, folder: Path, data: str, output: Path, *words: str) -> str:
    named = (str(ROOT / "examples" / example), str(folder), str(folder / data), str(output))
    program = Program(in_folder, [str(folder), "2", *named, *words], environment())
    printed, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, errors[-2000:]
    return printed


def loss_of_answers(folder: Path) -> float:
    """The mean over tokens of the answer, by plain transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    losses = []
    for asked in ASKED:
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([tokenizer.apply_chat_template([*asked, ANSWER], return_dict=False)])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        losses.append(model(ids, labels=labels).loss.item())
    return sum(losses) / len(losses)


@pytest.mark.full(short=["whole"])
@pytest.mark.parametrize("how", ["whole", "packed"])
def test_a_folder_is_tuned_on_answers_and_resumed(tmp_path: Path, how: str) -> None:
    make_folder(tmp_path)
    talks, output = str(tmp_path / "talks.jsonl"), tmp_path / "out"
    packing = ("--packing",) if how == "packed" else ()
    shown = run("sft.py", tmp_path, "talks.jsonl", output, "--steps", "6", "--eval-data", talks, *WORDS, *packing)
    before, after = loss_of_answers(tmp_path), loss_of_answers(output / "final")
    assert after < 0.8 * before
    if how == "whole":
        told = re.findall(r"'eval_loss': '?([\d.]+)", shown)
        assert float(told[-1]) == pytest.approx(after, rel=2e-3)
    if how == "packed":
        run("sft.py", tmp_path, "talks.jsonl", output, "--steps", "8", *WORDS, *packing)
        state = json.loads((output / "checkpoint-8" / "trainer_state.json").read_text(encoding="utf-8"))
        assert state["global_step"] == 8
        assert loss_of_answers(output / "final") < after


@pytest.mark.full
def test_a_folder_is_aligned_with_preferences_by_adapters(tmp_path: Path) -> None:
    make_folder(tmp_path)
    run("dpo.py", tmp_path, "pairs.jsonl", tmp_path / "out", "--steps", "6", "--lora", "4", *WORDS)
    names = {path.name for path in (tmp_path / "out" / "final").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert preference(tmp_path / "out" / "final") > preference(tmp_path) + 0.5


def preference(folder: Path) -> float:
    """The mean difference between the log-probabilities of chosen and rejected texts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def score(prompt: str, text: str) -> float:
        start, ids = len(tokenizer(prompt)["input_ids"]), torch.tensor([tokenizer(prompt + text)["input_ids"]])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        return float(scores[start - 1 :].sum())

    texts = [asked[0]["content"] for asked in ASKED]
    return sum(score(text, " one two") - score(text, " no") for text in texts) / len(texts)
