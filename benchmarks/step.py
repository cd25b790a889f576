"""The training step alone, ours beside the speculators library's, at the same shape, in the same run.

    python benchmarks/step.py                       Qwen3-8B: H 4096, 5 layers, T 8192, 512 anchors, B 16, V 151,936, on a GPU
    python benchmarks/step.py --hidden 64 --vocab 512 --row-tokens 256 --anchors 8 --block 4 --layers 2 --variants ours-eager
    python benchmarks/step.py --profile ours        where the time of a step goes, by kernel

A step is forward, loss, backward and optimizer on one packed row of four documents, three quarters of each supervised; the
row lies in the GPU's memory, and fresh anchors are drawn each time. Ours has the teacher's tokens at hand, as after the first epoch
or `dflash targets`; `ours-teacher` runs the teacher's head in every step. Each variant runs in a process of its own.
speculators' rows need that library; without it they are left out. FLOPs are counted, not measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

CARD_TFLOPS = 790
"""bfloat16, of an H200, measured with a product of two 8192 x 8192 matrices."""
VARIANTS = {
    "speculators": "bf16 weights and moments, its eager loss, torch.compile",
    "speculators-fp32": "the same with fp32 weights and moments, under autocast",
    "ours": "fp32 weights and moments",
    "ours-teacher": "the same, the teacher's head run in every step",
    "ours-float8": "fp32 weights and moments, run.float8",
    "ours-eager": "fp32 weights and moments, not compiled",
}


def make_row(options: argparse.Namespace, device: torch.device) -> Any:
    """One packed row of four documents."""
    from dflash_cache.train.batch import Batch

    length = options.row_tokens // 4
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(3, options.vocab - 10, (options.row_tokens,), generator=generator)
    position_T = torch.arange(options.row_tokens, dtype=torch.int32) % length
    supervised_T = position_T >= length // 4
    ends_T = position_T == length - 1
    return Batch(
        input_ids_T=ids_T,
        document_T=(torch.arange(options.row_tokens) // length).int(),
        position_T=position_T,
        loss_mask_T=supervised_T,
        next_ids_T=torch.where(ends_T, -1, ids_T.roll(-1)),
        next_supervised_T=supervised_T.roll(-1) & ~ends_T,
        features=torch.randn(options.row_tokens, options.features, options.hidden, device=device, dtype=torch.bfloat16),
        verifier=torch.randn(options.row_tokens, options.hidden, generator=generator).bfloat16(),
        sample_ids=tuple((0, number) for number in range(4)),
        sources=("noise",) * 4,
    )


class SyntheticHead:
    """A target's head of noise: what `TargetHead` is without files."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        from dflash_cache.train.loss import Head

        self.device, self.dtype = device, torch.bfloat16
        self.embedding_VH, weight = (torch.randn(options.vocab, options.hidden, device=device, dtype=self.dtype) for _ in range(2))
        self.head = Head(weight * options.hidden**-0.5)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding_VH[ids]

    def teacher_tokens(self, verifier_nH: torch.Tensor) -> torch.Tensor:
        largest = torch.compile(lambda product_nV: self.head.shape(product_nV).max(-1).indices)
        parts = torch.nn.functional.pad(verifier_nH, (0, 0, 0, -len(verifier_nH) % 2048)).split(2048)
        return torch.cat([largest(self.head.product(part)) for part in parts])[: len(verifier_nH)]


def ours(options: argparse.Namespace, variant: str, device: torch.device) -> Any:
    """A function that takes one step."""
    from dflash_cache.train.config import LossConfig, OptimConfig
    from dflash_cache.train.device import Compute
    from dflash_cache.train.drafter import Drafter
    from dflash_cache.train.optim import apply_gradients, build_optimizer
    from dflash_cache.train.step import StepSeeds, row_loss
    from dflash_cache.train.teacher import TeacherCache

    spec = make_spec(options)
    compute = Compute(device, torch.bfloat16, "flex" if device.type == "cuda" else "dense")
    with torch.device(device):
        drafter = Drafter(spec)
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    head, batch = SyntheticHead(options, device), make_row(options, device)
    if variant == "ours-float8":
        drafter.multiply_in_float8()
        head.head = head.head.with_float8_gradients()
    if variant != "ours-eager":
        drafter.compile_layers()
    optimizer = build_optimizer(drafter, OptimConfig())
    config = LossConfig(anchors_per_row=options.anchors, anchors_per_document=options.anchors)
    known = None if variant == "ours-teacher" else TeacherCache(1 << 30)
    if known is not None:
        known.remember(batch, head.teacher_tokens(batch.verifier.to(device)).int().cpu())
    parameters = list(drafter.parameters())

    def step(number: int) -> float:
        row = row_loss(drafter, spec, head, batch, config, compute, StepSeeds.at(0, number, 0, 0, device), known)  # type: ignore[arg-type]
        row.loss.backward()
        apply_gradients(parameters, optimizer, row.sums.weight_sum, 1e-4, 1.0, row.sums.loss_sum.isfinite())
        return row.sums.mean

    return step


def make_spec(options: argparse.Namespace) -> Any:
    """A drafter of the shape asked for."""
    from dflash_cache.train.drafter_spec import DrafterSpec

    return DrafterSpec(
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_attention_heads=options.hidden // 128 or 1,
        num_key_value_heads=options.hidden // 512 or 1,
        head_dim=min(128, options.hidden),
        intermediate_size=3 * options.hidden,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        layer_types=("full_attention",) * options.layers,
        block_size=options.block,
        mask_token_id=options.vocab - 1,
        target_layer_ids=tuple(range(1, options.features + 1)),
        num_target_layers=36,
        vocab_size=options.vocab,
    )


def speculators(options: argparse.Namespace, variant: str, device: torch.device) -> Any:
    """A function that takes one step of its drafter."""
    import speculators.models.dflash.core as core
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashSpeculatorConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    spec = make_spec(options)
    layer = Qwen3Config(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
    )
    layer._attn_implementation = "simple_flex_attention"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=spec.vocab_size,
        block_size=spec.block_size,
        aux_hidden_state_layer_ids=[number + 1 for number in spec.target_layer_ids],
        mask_token_id=spec.mask_token_id,
        sample_from_anchor=False,
    )
    torch.manual_seed(0)
    wide = variant == "speculators-fp32"
    with torch.device(device):
        model = core.DFlashDraftModel(config)
    model = model.to(torch.float32 if wide else torch.bfloat16)
    for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        frozen.to(torch.bfloat16).requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), fused=True)
    losses = {"ce": (resolve_loss_config("ce", "eager")["ce"][0], 1.0)}
    batch = make_row(options, device).to(device)
    inputs = {
        "hidden_states": batch.features.flatten(1)[None],
        "input_ids": batch.input_ids_T[None],
        "loss_mask": batch.loss_mask_T[None],
        "verifier_last_hidden_states": batch.verifier[None],
        "document_ids": batch.document_T[None],
        "position_ids": batch.position_T[None].long(),
        "loss_config": losses,
        "max_anchors": options.anchors,
    }

    def step(number: int) -> float:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=wide):
            _, loss, _ = model(**inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


def flops(options: argparse.Namespace) -> float:
    """Of one step: every product of ours forward and backward, attention aside; all drafted slots of all blocks in the head."""
    spec, slots = make_spec(options), options.anchors * options.block
    heads, groups = (count * spec.head_dim for count in (spec.num_attention_heads, spec.num_key_value_heads))
    layer = slots * spec.hidden_size * (2 * heads + 3 * spec.intermediate_size) + (options.row_tokens + slots) * spec.hidden_size * 2 * groups
    fc = options.row_tokens * options.features * spec.hidden_size**2
    head = options.anchors * (options.block - 1) * spec.hidden_size * spec.vocab_size
    return 2.0 * (3 * spec.num_layers * layer + 2 * fc + 2 * head)  # fc's input and the head's weight have no gradient


def measure(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Median seconds of a step, and what it took to get there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    step = (speculators if variant.startswith("speculators") else ours)(options, variant, device)
    began = time.perf_counter()
    losses = [step(0)]
    first = time.perf_counter() - began
    losses += [step(number) for number in range(1, 4)]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for number in range(4, 4 + options.steps):
        began = time.perf_counter()
        losses.append(step(number))
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds = sorted(times)[len(times) // 2]
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    if variant == options.profile:
        show_profile(step)
        print(torch._dynamo.utils.compile_times(), file=sys.stderr)
    return {"variant": variant, "seconds": seconds, "first": first, "peak_gb": peak, "losses": [losses[0], losses[-1]], "best": min(times)}


def show_profile(step: Any) -> None:
    """GPU time by kernel over three steps, on stderr."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for number in range(100, 103):
            step(number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = [event for event in found.key_averages() if event.self_device_time_total and not event.cpu_time_total]
    total = sum(event.self_device_time_total for event in events)
    print(f"{total / 3000:8.2f} ms of GPU time a step", file=sys.stderr)
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:45]:
        print(f"{event.self_device_time_total / 3000:8.2f} ms {event.count / 3:6.1f} x {event.key[:110]}", file=sys.stderr)


def main() -> None:
    """Run each variant in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 4096, "vocab": 151_936, "features": 5, "layers": 5, "row-tokens": 8192, "anchors": 512, "block": 16, "steps": 20}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), help="(default: all)")
    parser.add_argument("--profile", metavar="VARIANT", help="also show where this variant's time goes")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options, options.variants[0])))
        return
    counted = flops(options)
    print(f"{counted / 1e12:.1f} TFLOP a step by count: {counted / CARD_TFLOPS / 1e9:.1f} ms at {CARD_TFLOPS} TFLOP/s")
    print(f"{'':18} {'s a step':>9} {'tokens/s':>9} {'ratio':>6} {'peak GB':>8} {'of card':>8} {'first step s':>12}  loss first, last")
    base = None
    for variant in options.variants:
        same = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in sizes]
        same += ["--profile", options.profile] if options.profile else []
        done = subprocess.run([sys.executable, __file__, "--one", "--variants", variant, *same], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{variant:18} failed", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        base = base or found["seconds"]
        share = counted / found["seconds"] / 1e12 / CARD_TFLOPS
        losses = ", ".join(f"{loss:.3f}" for loss in found["losses"])
        print(
            f"{variant:18} {found['seconds']:9.4f} {options.row_tokens / found['seconds']:9,.0f} {base / found['seconds']:6.2f} "
            f"{found['peak_gb']:8.2f} {share:8.1%} {found['first']:12.1f}  {losses}",
            flush=True,
        )


if __name__ == "__main__":
    main()
