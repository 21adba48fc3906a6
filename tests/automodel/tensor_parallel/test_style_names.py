"""Every name of a style that the installed transformers uses is known here."""

import re
from pathlib import Path

import transformers
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from megatron_fsdp.automodel.tensor_parallel.plans import STYLE_NAMES

EXPERT_PARALLEL = {"grouped_gemm", "ep_dispatch_experts"}
"""Names of plans for expert parallelism, which are other plans."""

_PLAN = re.compile(r"^\s+(?:base_model)?_tp_plan(?::[^=\n]*)?\s*=\s*\{(.*?)\}\s*$", re.DOTALL | re.MULTILINE)
_STYLE = re.compile(r'": "(\w+)"')


def styles_in_use() -> dict[str, str]:
    """Name of a style -> a file with a plan that uses it, from the text of all plans."""
    found = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/*.py")):
        for text in _PLAN.findall(path.read_text(encoding="utf-8")):
            found.update(dict.fromkeys(_STYLE.findall(text), path.name))
    return found


def test_every_style_in_plans_of_transformers_is_known() -> None:
    used = styles_in_use()
    assert {"colwise", "moe_tp_experts", "mla_kv_a_proj", "local_params", "embedding_rowwise"} <= used.keys()
    assert {name: path for name, path in used.items() if name not in STYLE_NAMES} == {}


def test_every_style_that_transformers_registers_is_known() -> None:
    assert set(ALL_PARALLEL_STYLES.keys()) - STYLE_NAMES - EXPERT_PARALLEL == set()
