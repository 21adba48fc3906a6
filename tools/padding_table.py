"""The padding of known models' layers, beside the least-common-multiple rule; a table of docs/memory.md."""

import math
from dataclasses import dataclass

from megatron_fsdp.sharding.placement import plan_layout

Shape = tuple[int, ...]

RANK_COUNTS = tuple(2**power for power in range(1, 11))
SHOWN_RANKS = (8, 64, 1024)
BF16_ALIGNMENT_NUMEL = 8  # 16 bytes


@dataclass(frozen=True)
class Group:
    """The tensors of one parameter group, with a name for the table."""

    name: str
    shapes: tuple[Shape, ...]


def gated_block(name: str, hidden: int, kv: int, ffn: int, *, qkv_bias: bool = False) -> Group:
    """A Llama-like block: attention with `kv` key and value features, gated feed-forward, two norms."""
    attention = ((hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden))
    biases = ((hidden,), (kv,), (kv,)) if qkv_bias else ()
    feed_forward = ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    return Group(name, (*attention, *biases, *feed_forward, (hidden,), (hidden,)))


def gpt2_block() -> Group:
    """GPT-2 (124M) keeps its linear weights as (in, out)."""
    norm = ((768,), (768,))
    attention = ((768, 2304), (2304,), (768, 768), (768,))
    feed_forward = ((768, 3072), (3072,), (3072, 768), (768,))
    return Group("GPT-2 124M, block", (*norm, *attention, *norm, *feed_forward))


def gemma2_block() -> Group:
    """Gemma-2-2B: 8 heads of 256 on a hidden size of 2,304, four norms."""
    attention = ((2048, 2304), (1024, 2304), (1024, 2304), (2304, 2048))
    feed_forward = ((9216, 2304), (9216, 2304), (2304, 9216))
    return Group("Gemma-2-2B, block", (*attention, *feed_forward, *((2304,),) * 4))


def deepseek_v3_dense() -> tuple[Shape, ...]:
    """A layer of DeepSeek-V3 without routed experts: latent attention, router, shared expert, norms."""
    attention = ((1536, 7168), (1536,), (24576, 1536), (576, 7168), (512,), (32768, 512), (7168, 16384))
    router = ((256, 7168), (256,))
    shared_expert = ((2048, 7168), (2048, 7168), (7168, 2048))
    return (*attention, *router, *shared_expert, (7168,), (7168,))


def deepseek_v3_experts(count: int) -> tuple[Shape, ...]:
    """Routed experts, fused into one tensor per projection."""
    return ((count, 4096, 7168), (count, 7168, 2048))


def gpt_oss_dense() -> tuple[Shape, ...]:
    """A layer of GPT-OSS-20B without experts."""
    attention = ((4096, 2880), (4096,), (512, 2880), (512,), (512, 2880), (512,), (2880, 4096), (2880,), (64,))
    return (*attention, (32, 2880), (32,), (2880,), (2880,))


def gpt_oss_experts() -> tuple[Shape, ...]:
    """32 experts, fused, with biases."""
    return ((32, 2880, 5760), (32, 5760), (32, 2880, 2880), (32, 2880))


def groups() -> tuple[Group, ...]:
    """Return every group of the table."""
    return (
        gated_block("Llama-2-7B, block", 4096, 4096, 11008),
        gated_block("Llama-3-8B, block", 4096, 1024, 14336),
        Group("Llama-3-8B, embedding, head and norm", ((128256, 4096), (128256, 4096), (4096,))),
        gated_block("Llama-3-70B, block", 8192, 1024, 28672),
        gated_block("Qwen2.5-0.5B, block", 896, 128, 4864, qkv_bias=True),
        Group("Qwen2.5-0.5B, tied embedding and norm", ((151936, 896), (896,))),
        gated_block("Qwen2.5-7B, block", 3584, 512, 18944, qkv_bias=True),
        gpt2_block(),
        Group("GPT-2 124M, embeddings and norm", ((50257, 768), (1024, 768), (768,), (768,))),
        gemma2_block(),
        Group("DeepSeek-V3, MoE layer without routed experts", deepseek_v3_dense()),
        Group("DeepSeek-V3, 256 fused experts", deepseek_v3_experts(256)),
        Group("DeepSeek-V3, whole MoE layer with 16 local experts", (*deepseek_v3_dense(), *deepseek_v3_experts(16))),
        Group("GPT-OSS-20B, layer without experts", gpt_oss_dense()),
        Group("GPT-OSS-20B, 32 fused experts", gpt_oss_experts()),
    )


def lcm_rule_numel(shapes: tuple[Shape, ...], num_shards: int) -> int:
    """Buffer elements under the rule that every shard is a multiple of the least common multiple of the row sizes.

    Rows are visited largest first, and a tensor smaller than the multiple so far is left out of it. Gaps that the rule
    leaves inside the buffer are not counted, so that this is the least it can need.
    """
    multiple = 1
    for shape in sorted(shapes, key=lambda shape: -math.prod(shape[1:])):
        if math.prod(shape) >= multiple:
            multiple = math.lcm(multiple, math.prod(shape[1:]))
    step = num_shards * multiple
    return -(-sum(math.prod(shape) for shape in shapes) // step) * step


def fractions(group: Group, num_shards: int) -> tuple[float, float]:
    """Return the padding over the parameters, of the layout and of the least-common-multiple rule."""
    layout = plan_layout(group.shapes, num_shards, alignment_numel=BF16_ALIGNMENT_NUMEL)
    return layout.padding_fraction, lcm_rule_numel(group.shapes, num_shards) / layout.payload_numel - 1


def render() -> str:
    """Return the table: padding of the layout / of the least-common-multiple rule, by number of ranks."""
    lines = [
        f"| tensors | parameters | {' | '.join(f'{count:,} ranks' for count in SHOWN_RANKS)} |",
        "|---|---:" + "|---:" * len(SHOWN_RANKS) + "|",
    ]
    for group in groups():
        numel = sum(math.prod(shape) for shape in group.shapes)
        cells = ["{:.2%} / {:,.2%}".format(*fractions(group, count)) for count in SHOWN_RANKS]
        lines.append(f"| {group.name} | {numel:,} | {' | '.join(cells)} |")
    return "\n".join(lines)
