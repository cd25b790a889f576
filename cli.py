"""The command line: one function a verb. Each body loads a configuration, calls one function and prints one result.

Imports nothing heavy at the top: `dflash --help` needs neither torch nor vLLM.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from . import __version__
from .common.errors import DflashError, InputError
from .common.flags import assignments, layer_list, pairs, temperature_list

FOLDER = click.Path(path_type=Path, file_okay=False)


class Verbs(click.Group):
    """Turns errors into a few lines on stderr and an exit code; `--debug` keeps the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DflashError as error:
            if ctx.meta.get("debug"):
                traceback.print_exc()
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except (click.ClickException, click.exceptions.Exit, click.Abort, KeyboardInterrupt):
            raise
        except Exception as error:
            if ctx.meta.get("debug"):
                raise
            click.echo(
                f"Error: unexpected {type(error).__name__}: {error}\n  fix:      run again with --debug for the traceback, and report it", err=True
            )
            ctx.exit(1)


def debug_option(command: Callable) -> Callable:
    """Adds --debug, which may stand before or after the verb."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_root().meta["debug"] = True

    return click.option("--debug", is_flag=True, expose_value=False, callback=remember, help="Show the traceback of an error.")(command)


def json_option(command: Callable) -> Callable:
    """Adds --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else there.")(command)


def show(result: Any, as_json: bool) -> None:
    """Print a result record: its `to_dict` as JSON or its `to_text`."""
    click.echo(json.dumps(result.to_dict(), indent=2) if as_json else result.to_text())


def parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """`parse` for `click.option(callback=)`: not called for a flag that was not given."""
    return lambda _, __, text: None if text is None else parse(text)


def rows_options(command: Callable) -> Callable:
    """Adds the flags that say how rows are read; `rows_fields` makes fields of them."""
    flags = [
        click.option(
            "--data-format",
            type=click.Choice(["messages", "sharegpt", "alpaca", "prompt-response", "text", "tokens"]),
            help="Shape of the rows. Default: found out row by row.",
        ),
        click.option("--column", "columns", multiple=True, metavar="NAME=COLUMN", help="The dataset's name of a column. Repeatable."),
        click.option("--role", "roles", multiple=True, metavar="THEIRS=OURS", help="What a role of the dataset stands for. Repeatable."),
        click.option("--chat-template", type=click.Path(path_type=Path, dir_okay=False), help="Jinja file instead of the target's own template."),
        click.option(
            "--template-arg", "template_args", multiple=True, metavar="KEY=VALUE", help="For the chat template: enable_thinking=false. Repeatable."
        ),
    ]
    for option in reversed(flags):
        command = option(command)
    return command


def rows_fields(flags: dict[str, Any]) -> dict[str, Any]:
    """Given flags as config fields; those that were not given are left out."""
    given = {name: value for name, value in flags.items() if value is not None}
    given["columns"] = pairs(given["columns"], "--column", "prompt=question")
    given["roles"] = pairs(given["roles"], "--role", "bot=assistant")
    given["template_args"] = assignments(given["template_args"], "--template-arg", keep=True)
    return given


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="dflash-cache")
@debug_option
def main() -> None:
    """Extract a target model's hidden states once, train many DFlash drafters from them.

    \b
    dflash extract --model Qwen/Qwen3-8B --data train.jsonl --cache cache
    dflash verify cache
    dflash train --cache cache --out runs/base
    dflash eval --cache held-out --drafter runs/base
    dflash export runs/base --to drafter
    """


@main.command()
@click.option("--model", required=True, help="Target: a folder or a Hugging Face name.")
@click.option(
    "--layers", callback=parsed(layer_list), help="Blocks whose output is stored, 0-based, with commas. Default: round(linspace(1, n-3, 5))."
)
@click.option("--verifier-layer", type=int, help="Block whose raw output gives the teacher's logits. Default and only sensible value: the last.")
@click.option("--force-verifier-layer", is_flag=True, help="Accept another verifier layer.")
@click.option(
    "--data", multiple=True, required=True, help="File, pattern, saved folder or hub NAME[@CONFIG][:SPLIT]; then :20000 rows or :25%. Repeatable."
)
@click.option("--cache", type=FOLDER, required=True, help="Folder to write, or to continue.")
@rows_options
@click.option("--supervise", type=click.Choice(["all", "assistant", "last"]), help="Tokens to learn from. Default: assistant.")
@click.option("--turns", type=click.Choice(["all", "each"]), help="each: every assistant turn ends a sample of its own. Default: all.")
@click.option("--max-length", type=int, help="Longest document, tokens.")
@click.option("--overlong", type=click.Choice(["reject", "truncate"]), help="What to do with longer ones. Default: reject.")
@click.option("--min-supervised", type=int, help="Fewest tokens to learn from in a sample. Default: 1.")
@click.option("--max-rejects", type=float, help="Stop when a larger share of the rows is rejected; 1 never does. Default: 0.5.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N rows.")
@click.option("--engine", type=click.Choice(["vllm", "transformers"]), help="What runs the target. Default: vllm.")
@click.option("--generate", is_flag=True, help="Let the target write every assistant turn, and capture in the same pass.")
@click.option("--max-new-tokens", type=int, help="Longest answer with --generate, tokens.")
@click.option("--temperature", type=float, help="Of --generate; 0 is greedy.")
@click.option("--top-p", type=float, help="Of --generate: sample from the likeliest tokens with this probability together. Default: 1, all.")
@click.option("--top-k", type=int, help="Of --generate: sample from so many likeliest tokens. Default: 0, all.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes, each with an engine on its own GPUs. Default: 1.")
@click.option("--rank", type=click.IntRange(min=0), help="Which of --world-size extractions into one cache this is, from 0.")
@click.option("--world-size", type=click.IntRange(min=1), help="How many extractions, each with its own --rank, share the documents.")
@click.option("--stall-seconds", type=click.FloatRange(min=0, min_open=True), help="Fail when no document finishes for so long. Default: 600.")
@click.option("--mantissa-bits", type=click.Choice(["7", "3"]), help="Kept of each feature: 7 is lossless.")
@click.option("--preview", "preview_count", type=click.IntRange(min=1), metavar="N", help="Show N samples and what is learned; write nothing.")
@click.option("--estimate", "only_estimate", is_flag=True, help="Print tokens, bytes, parts and hours; write nothing.")
@click.option("--tokens-per-second", type=click.FloatRange(min=0, min_open=True), help="Of your engine, for the hours of --estimate.")
@click.option("--seed", type=int, help="Of the order on disk, the rows of a share and the sampler.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="Passed to vLLM. Repeatable.")
@json_option
@debug_option
def extract(
    as_json: bool,
    only_estimate: bool,
    preview_count: int | None,
    tokens_per_second: float | None,
    engine_args: tuple[str, ...],
    **flags: Any,
) -> None:
    """Run the target over a chat dataset and write its hidden states into a feature cache.

    The same command again continues where it stopped; a changed setting is refused.

    \b
    dflash extract --model Qwen/Qwen3.6-27B --layers 1,16,31,46,61 --verifier-layer 63 --data train.jsonl --cache qwen36-cache
    dflash extract --model ./smollm2 --data prompts.jsonl --generate --max-new-tokens 96 --cache cache
    dflash extract --model ./smollm2 --data 'chats/*.jsonl.gz' --data code.parquet:20000 --cache cache --preview 3
    dflash extract --model Qwen/Qwen3-8B --data train.jsonl --cache cache --workers 8
    """
    from .common.config import build
    from .extract.config import ExtractConfig

    given = rows_fields(flags)
    if "mantissa_bits" in given:
        given["mantissa_bits"] = int(given["mantissa_bits"])
    if not flags["generate"] and (unused := [name for name in ("max_new_tokens", "temperature", "top_p", "top_k") if name in given]):
        raise InputError(
            "has no effect without --generate",
            place=", ".join("--" + name.replace("_", "-") for name in unused),
            fix="add --generate, or leave it out",
        )
    if (flags["rank"] is None) != (flags["world_size"] is None):
        given_flag, missing = ("--rank", "--world-size") if flags["world_size"] is None else ("--world-size", "--rank")
        raise InputError(f"needs {missing} as well", place=given_flag, fix="give both, for example --rank 0 --world-size 4")
    if tokens_per_second is not None and not only_estimate:
        raise InputError("has no effect without --estimate", place="--tokens-per-second", fix="add --estimate, or leave it out")
    config = build(ExtractConfig, {**given, "engine_args": assignments(engine_args, "--engine-arg")}, "dflash extract")
    if preview_count:
        from .extract.preview import preview

        return show(preview(config, preview_count), as_json)
    if only_estimate:
        from .extract.estimate import estimate

        return show(estimate(config, tokens_per_second), as_json)
    from .extract.run import run
    from .train.fidelity import TeacherCheck

    show(run(config, TeacherCheck), as_json)


@main.command()
@click.argument("cache", type=FOLDER)
@click.option("--sample", type=click.IntRange(min=0), metavar="K", help="Show the text of sample K, from 0, and what is learned from it.")
@json_option
@debug_option
def inspect(cache: Path, sample: int | None, as_json: bool) -> None:
    """Show what is in a cache: model, layers, tokens, bytes per token, lengths, norms by layer.

    \b
    dflash inspect qwen36-cache
    dflash inspect qwen36-cache --sample 7
    dflash inspect qwen36-cache --json | jq .bytes_per_token
    """
    from .train.inspect_cache import inspect as describe

    if sample is not None:
        from .extract.preview import stored_sample
        from .train.inspect_cache import sample_tokens

        return show(stored_sample(cache, *sample_tokens(cache, sample)), as_json)
    show(describe(cache), as_json)


@main.command()
@click.argument("cache", type=FOLDER)
@click.option("--repair", "repairs", is_flag=True, help="Move what is damaged to CACHE/quarantine; the next extract fills it again.")
@json_option
@debug_option
def verify(cache: Path, repairs: bool, as_json: bool) -> None:
    """Prove a cache: every checksum, shape and count, finite values, and teacher fidelity. Exit code 1 if anything is wrong.

    With --repair, exit code 0 means that what is left is whole; the rows to extract again are listed.

    \b
    dflash verify qwen36-cache
    dflash verify --repair qwen36-cache
    """
    report: Any
    if repairs:
        from .train.repair import repair

        report = repair(cache)
    else:
        from .train.verify import verify as prove

        report = prove(cache)
    show(report, as_json)
    if not report.ok:
        sys.exit(1)


@main.command()
@click.argument("cache", type=FOLDER)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N; as the trainings that are to use them.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
    help="Of the products; as run.dtype in training.",
)
@json_option
@debug_option
def targets(cache: Path, device: str, dtype: str, as_json: bool) -> None:
    """Keep the teacher's tokens in a cache, so that no training reads its verifier states or runs the target's head over them.

    Training does so itself before its first step, unless it reads less than all of the data. The same command again computes only
    what is missing or damaged.

    \b
    dflash targets qwen36-cache
    dflash targets held-out --device cuda:1 --json
    """
    from .train.targets_pass import compute_targets

    show(compute_targets(cache, device, dtype), as_json)


@main.command()
@click.option("--cache", "caches", type=FOLDER, multiple=True, required=True, help="Feature cache. Repeatable: several of the same target.")
@click.option("--eval-cache", "eval_caches", type=FOLDER, multiple=True, help="Held-out feature cache, evaluated during training. Repeatable.")
@click.option("--out", type=FOLDER, required=True, help="Folder of the run.")
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="YAML file of fields.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Set one field. Repeatable.")
@click.option("--dry-run", "only_resolve", is_flag=True, help="Resolve, validate and print the configuration; train nothing.")
@click.option("--resume", is_flag=True, help="Continue the run in --out.")
@json_option
@debug_option
def train(
    caches: tuple[Path, ...],
    eval_caches: tuple[Path, ...],
    out: Path,
    config_file: Path | None,
    overrides: tuple[str, ...],
    only_resolve: bool,
    resume: bool,
    as_json: bool,
) -> None:
    """Train a drafter from feature caches. Needs the caches alone: no target, no tokenizer, no network.

    \b
    dflash train --cache qwen36-cache --out runs/base
    dflash train --cache qwen36-cache --out runs/block8 --set model.block_size=8 --set optim.lr=3e-4
    torchrun --nproc-per-node 8 -m dflash_cache train --cache qwen36-cache --out runs/eight
    """
    from .common.config import load
    from .train.config import TrainConfig

    config = load(TrainConfig, file=config_file, overrides=overrides)
    if only_resolve:
        from .train.resolve import dry_run

        click.echo(json.dumps(dry_run(config, list(caches), list(eval_caches)), indent=2))
        return
    from .train.launch import read_launch
    from .train.run import run

    summary = run(config, list(caches), out, resume=resume, eval_caches=list(eval_caches))
    if read_launch().first:
        show(summary, as_json)


@main.command("eval")
@click.option("--cache", "caches", type=FOLDER, multiple=True, help="Held-out feature cache: acceptance length offline. Repeatable.")
@click.option("--drafter", type=FOLDER, required=True, help="A run's folder or an exported drafter; with --engine an exported one.")
@click.option("--engine", type=click.Choice(["vllm"]), help="Serve target and drafter for real.")
@click.option("--model", help="Target, with --engine.")
@click.option(
    "--data", multiple=True, help="Prompts, with --engine: as for extraction, or gsm8k, humaneval, mt-bench; then :200 rows or :25%. Repeatable."
)
@rows_options
@click.option("--max-length", type=int, help="Longest prompt and answer together, tokens, with --engine.")
@click.option("--max-new-tokens", type=int, help="Longest answer, tokens, with --engine.")
@click.option(
    "--temperature", "temperatures", callback=parsed(temperature_list), help="0 is greedy. Offline several with commas, each expected: 0,0.6,1.0."
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N prompts or samples.")
@click.option("--concurrency", type=int, help="Requests at once, with --engine. Default: 8.")
@click.option("--num-speculative-tokens", type=int, help="Tokens drafted at once, with --engine. Default: the drafter's block size - 1.")
@click.option("--no-baseline", is_flag=True, help="Serve with the drafter only: no speed-up, and answers are not compared.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the bootstrap; with --engine also of sampling and of a share's rows.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False), help="Offline: also draw it (.png, .svg, .pdf).")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="Passed to vLLM. Repeatable.")
@json_option
@debug_option
def evaluate(
    caches: tuple[Path, ...],
    drafter: Path,
    engine: str | None,
    limit: int | None,
    temperatures: tuple[float, ...] | None,
    no_baseline: bool,
    seed: int | None,
    plot_file: Path | None,
    engine_args: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure the acceptance length: offline from a held-out cache, or served for real in vLLM.

    Offline, serving is simulated on documents that the drafter has not seen; with --engine the prompts are answered twice,
    with the drafter and without, and the answers compared.

    \b
    dflash eval --cache held-out --drafter runs/base
    dflash eval --cache held-out --drafter runs/base --temperature 0,0.6,1.0 --plot base.png
    dflash eval --engine vllm --model ./target --drafter ./drafter --data prompts.jsonl
    dflash eval --engine vllm --model ./target --drafter ./drafter --data gsm8k:200 --data humaneval --concurrency 1 --json
    dflash eval --engine vllm --model ./target --drafter ./drafter --data mt-bench --template-arg enable_thinking=false --no-baseline
    """
    from .common.config import build

    if bool(caches) == bool(engine):
        raise InputError("give either --cache (offline) or --engine vllm with --model and --data (served)", place="dflash eval")
    if engine:
        from .extract.config import ServeConfig
        from .extract.serve import evaluate_served

        if temperatures is not None and len(temperatures) > 1:
            raise InputError("serving is at one temperature", place="--temperature", found=", ".join(map(str, temperatures)), fix="run it for each")
        if plot_file is not None:
            raise InputError("has no effect with --engine", place="--plot", fix="leave it out")
        given = rows_fields({**flags, "limit": limit, "seed": seed, "temperature": temperatures[0] if temperatures else None})
        given |= {"drafter": drafter, "baseline": not no_baseline, "engine_args": assignments(engine_args, "--engine-arg")}
        return show(evaluate_served(build(ServeConfig, given, "dflash eval --engine vllm")), as_json)
    if unused := [name for name, value in {**flags, "no_baseline": no_baseline, "engine_args": engine_args}.items() if value]:
        repeated = ("engine_args", "columns", "roles", "template_args")
        names = ", ".join("--" + name.removesuffix("s" if name in repeated else "").replace("_", "-") for name in unused)
        raise InputError("has no effect without --engine vllm", place=names, fix="add --engine vllm instead of --cache, or leave it out")
    from .train.config import EvalConfig

    wanted = {"temperatures": temperatures, "seed": seed}
    config = build(EvalConfig, {name: value for name, value in wanted.items() if value is not None}, "dflash eval")
    if plot_file is not None:
        from .train.eval_plot import check_plot

        check_plot(plot_file)
    from .train.evaluate import evaluate as measure

    result = measure(drafter, list(caches), config, limit=limit)
    if plot_file is not None:
        from .train.eval_plot import plot

        plot(result, plot_file)
    show(result, as_json)


@main.command()
@click.argument("run", type=FOLDER, required=False)
@click.option("--to", "destination", type=FOLDER, help="Folder to write; must not exist.")
@click.option(
    "--format",
    type=click.Choice(["zlab", "speculators"]),
    help="zlab: for vLLM, SGLang and the reference. speculators: for vLLM and the speculators library. Default: zlab.",
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Of the tensors. Default: bfloat16.")
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint of this step. Default: the newest.")
@click.option("--best", is_flag=True, help="The checkpoint that drafts held-out samples best.")
@click.option("--include-embeddings", is_flag=True, help="Put the target's embedding and head into the file too, as the speculators format does.")
@click.option("--dry-run", is_flag=True, help="Print config and tensors; write nothing.")
@click.option("--check", "checked", type=FOLDER, metavar="FOLDER", help="Look for faults in an exported folder, of any origin; write nothing.")
@click.option("--cache", type=FOLDER, help="A cache of the run, when it was moved; with --check: of the target to check against.")
@click.option("--model", help="The target: its name in the folder; with --check its folder, to check against.")
@json_option
@debug_option
def export(
    run: Path | None, destination: Path | None, checked: Path | None, as_json: bool, cache: Path | None, model: str | None, **flags: Any
) -> None:
    """Turn a run's checkpoint into a folder that serving engines load, or check such a folder.

    What is written is read back, run on a few blocks, and compared with the checkpoint before it appears. --check ends with exit
    code 1 when it finds errors.

    \b
    dflash export runs/base --to drafter
    dflash export runs/base --to drafter --format speculators --best
    dflash export --check drafter --model ./target
    """
    given = {name: value for name, value in flags.items() if value is not None and value is not False}
    if checked is not None:
        wrong = [name for name, value in (("RUN", run), ("--to", destination)) if value is not None]
        if wrong := wrong + ["--" + name.replace("_", "-") for name in given]:
            raise InputError("writes nothing", place="dflash export --check", found=", ".join(wrong), fix="leave these out, or leave --check out")
        from .train.lint import lint

        report = lint(checked, Path(model) if model is not None else None, cache)
        show(report, as_json)
        sys.exit(0 if report.ok else 1)
    if run is None or (destination is None and not flags["dry_run"]):
        missing = "a run's folder" if run is None else "--to DIR"
        raise InputError(f"needs {missing}", place="dflash export", expected="RUN --to DIR, or --check FOLDER", fix="see dflash export --help")
    if flags["best"] and flags["step"] is not None:
        raise InputError("choose one checkpoint, not two", place="--best, --step", fix="leave one out")
    from .train.export import export as write

    show(write(run, destination, cache=cache, model=model, **given), as_json)


@main.command()
@click.option("--cache", type=FOLDER, required=True, help="Held-out feature cache; with --engine one that the target wrote (extract --generate).")
@click.option("--drafter", type=FOLDER, required=True, help="The exported folder that is served.")
@click.option("--run", type=FOLDER, help="The run that it came from: what was trained. Without it, better readings of the folder are looked for.")
@click.option("--engine", type=click.Choice(["vllm"]), help="Serve target and drafter too, and compare every block that the engine drafts.")
@click.option("--model", help="Target, with --engine.")
@click.option("--limit", type=click.IntRange(min=1), default=32, show_default=True, help="Only the first N documents that can be drafted.")
@click.option("--device", default="auto", show_default=True, help="Of the replays: auto, cpu, cuda, cuda:N.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="Passed to vLLM. Repeatable.")
@json_option
@debug_option
def doctor(
    cache: Path,
    drafter: Path,
    run: Path | None,
    engine: str | None,
    model: str | None,
    limit: int,
    device: str,
    trust_remote_code: bool,
    engine_args: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find out why a drafter's acceptance falls short of its training, and which convention is off.

    The same documents are drafted by the trainer, by a plain reading of the exported folder as vLLM reads it, and by the
    engine. Exit code 1 when any two part.

    \b
    dflash doctor --cache held-out --run runs/base --drafter drafter
    dflash doctor --cache held-out --run runs/base --drafter drafter --engine vllm --model ./target --limit 8
    dflash doctor --cache held-out --drafter somebodys-drafter
    """
    if (engine is None) != (model is None):
        raise InputError("are given together", place="--engine, --model", fix="give --engine vllm --model TARGET, or neither")
    if engine is None and (trust_remote_code or engine_args):
        raise InputError("has no effect without --engine vllm", place="--trust-remote-code, --engine-arg", fix="add --engine vllm --model TARGET")
    from .train.doctor import Answer, Request, diagnose

    def serve(requests: Sequence[Request]) -> list[Answer]:
        from .common.spec import load
        from .extract.draft_replay import replay_drafts

        prompts = [(request.prompt, request.answer_tokens) for request in requests]
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "engine_args": assignments(engine_args, "--engine-arg")}
        found = replay_drafts(str(model), drafter, prompts, content_hash=load(cache).settings.target.content_hash, **options)
        return [Answer(of.tokens, of.drafts, of.steps, of.accepted) for of in found]

    found = diagnose(cache, drafter, run, serve if engine else None, limit=limit, device=device)
    show(found, as_json)
    if not found.ok:
        sys.exit(1)


if __name__ == "__main__":
    main()
