"""The command line: six verbs. Each body loads a configuration, calls one function and prints one result.

Imports nothing heavy at the top: `dflash --help` needs neither torch nor vLLM.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from . import __version__
from .common.errors import DflashError, InputError

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


def assignments(texts: tuple[str, ...], flag: str, *, keep: bool = False) -> dict[str, Any]:
    """KEY=VALUE texts as a dict, values read as YAML. keep: dashes of a key stay."""
    import yaml

    values = {}
    for text in texts:
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise InputError("is no assignment", place=f"{flag} {text}", expected="KEY=VALUE", fix=f"for example {flag} tensor_parallel_size=4")
        try:
            values[key if keep else key.replace("-", "_")] = yaml.safe_load(raw)
        except yaml.YAMLError:
            raise InputError("the value is no YAML", place=f"{flag} {text}", fix="quote it, for example 'KEY=\"text\"'") from None
    return values


def layer_list(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """`1,16,31` as numbers."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            "is no list of layers", place="--layers", found=text, expected="block numbers with commas, for example 1,16,31,46,61"
        ) from None


def pairs(texts: tuple[str, ...], flag: str, example: str) -> dict[str, str]:
    """NAME=TEXT texts as a dict."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name and value):
            raise InputError("is no assignment", place=f"{flag} {text}", expected="NAME=TEXT", fix=f"for example {flag} {example}")
        found[name] = value
    return found


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
@click.option("--layers", callback=layer_list, help="Blocks whose output is stored, 0-based, with commas. Default: round(linspace(1, n-3, 5)).")
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
@click.option("--generate", is_flag=True, help="Let the target write the last answer, and capture prompt and answer in one pass.")
@click.option("--max-new-tokens", type=int, help="Longest answer with --generate, tokens.")
@click.option("--temperature", type=float, help="Of --generate; 0 is greedy.")
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
    if not flags["generate"] and (unused := [name for name in ("max_new_tokens", "temperature") if name in given]):
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
@click.option("--drafter", type=FOLDER, required=True, help="A run's folder or an exported drafter.")
@click.option("--engine", type=click.Choice(["vllm"]), help="Serve target and drafter for real.")
@click.option("--model", help="Target, with --engine.")
@click.option("--data", multiple=True, help="Prompts, as for extraction, with --engine. Repeatable.")
@rows_options
@click.option("--max-length", type=int, help="Longest prompt and answer together, tokens.")
@click.option("--max-new-tokens", type=int, help="Longest answer, tokens.")
@click.option("--temperature", type=float, help="0 is greedy.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N prompts or samples.")
@click.option("--concurrency", type=int, help="Requests at once, with --engine.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="Passed to vLLM. Repeatable.")
@json_option
@debug_option
def evaluate(
    caches: tuple[Path, ...], drafter: Path, engine: str | None, limit: int | None, engine_args: tuple[str, ...], as_json: bool, **flags: Any
) -> None:
    """Measure the acceptance length: offline from a held-out cache, or served for real in vLLM.

    \b
    dflash eval --cache held-out --drafter runs/base
    dflash eval --engine vllm --model ./target --drafter ./drafter --data prompts.jsonl
    """
    if bool(caches) == bool(engine):
        raise InputError("give either --cache (offline) or --engine vllm with --model and --data (served)", place="dflash eval")
    if engine:
        from .common.config import build
        from .extract.config import ServeConfig
        from .extract.serve import evaluate_served

        given = rows_fields({**flags, "limit": limit})
        config = build(
            ServeConfig, {**given, "drafter": drafter, "engine_args": assignments(engine_args, "--engine-arg")}, "dflash eval --engine vllm"
        )
        return show(evaluate_served(config), as_json)
    if unused := [name for name, value in {**flags, "engine_args": engine_args}.items() if value]:
        repeated = ("engine_args", "columns", "roles", "template_args")
        names = ", ".join("--" + name.removesuffix("s" if name in repeated else "").replace("_", "-") for name in unused)
        raise InputError("has no effect without --engine vllm", place=names, fix="add --engine vllm instead of --cache, or leave it out")
    from .train.evaluate import evaluate as measure

    show(measure(drafter, list(caches), limit=limit), as_json)


@main.command()
@click.argument("run", type=FOLDER)
@click.option("--to", "destination", type=FOLDER, required=True, help="Folder to write; must not exist.")
@click.option(
    "--format", type=click.Choice(["zlab"]), default="zlab", show_default=True, expose_value=False, help="zlab: for vLLM, SGLang and the reference."
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True, help="Of the tensors.")
@json_option
@debug_option
def export(run: Path, destination: Path, dtype: Any, as_json: bool) -> None:
    """Turn a run's newest checkpoint into a folder that serving engines load.

    \b
    dflash export runs/base --to drafter
    """
    from .train.export import export as write

    show(write(run, destination, dtype=dtype), as_json)


if __name__ == "__main__":
    main()
