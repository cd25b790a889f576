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


def assignments(texts: tuple[str, ...], flag: str) -> dict[str, Any]:
    """KEY=VALUE texts as a dict, values read as YAML."""
    import yaml

    values = {}
    for text in texts:
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise InputError("is no assignment", place=f"{flag} {text}", expected="KEY=VALUE", fix=f"for example {flag} tensor_parallel_size=4")
        try:
            values[key.replace("-", "_")] = yaml.safe_load(raw)
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
@click.option("--data", multiple=True, required=True, help="JSONL, JSON, Parquet or Arrow file, or a Hugging Face dataset. Repeatable.")
@click.option("--cache", type=FOLDER, required=True, help="Folder to write, or to continue.")
@click.option("--max-length", type=int, help="Longest document, tokens; longer rows are rejected and listed.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N rows.")
@click.option("--engine", type=click.Choice(["vllm", "transformers"]), help="What runs the target. Default: vllm.")
@click.option("--generate", is_flag=True, help="Let the target write the last answer, and capture prompt and answer in one pass.")
@click.option("--max-new-tokens", type=int, help="Longest answer with --generate, tokens.")
@click.option("--temperature", type=float, help="Of --generate; 0 is greedy.")
@click.option("--mantissa-bits", type=click.Choice(["7", "3"]), help="Kept of each feature: 7 is lossless.")
@click.option("--estimate", "only_estimate", is_flag=True, help="Print tokens, bytes and parts; write nothing.")
@click.option("--seed", type=int, help="Of the order on disk and of the sampler.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="Passed to vLLM. Repeatable.")
@json_option
@debug_option
def extract(as_json: bool, only_estimate: bool, engine_args: tuple[str, ...], **flags: Any) -> None:
    """Run the target over a chat dataset and write its hidden states into a feature cache.

    The same command again continues where it stopped; a changed setting is refused.

    \b
    dflash extract --model Qwen/Qwen3.6-27B --layers 1,16,31,46,61 --verifier-layer 63 --data train.jsonl --cache qwen36-cache
    dflash extract --model ./smollm2 --data prompts.jsonl --generate --max-new-tokens 96 --cache cache
    """
    from .common.config import build
    from .extract.config import ExtractConfig

    given = {name: value for name, value in flags.items() if value is not None}
    if "mantissa_bits" in given:
        given["mantissa_bits"] = int(given["mantissa_bits"])
    if not flags["generate"] and (unused := [name for name in ("max_new_tokens", "temperature") if name in given]):
        raise InputError(
            "has no effect without --generate",
            place=", ".join("--" + name.replace("_", "-") for name in unused),
            fix="add --generate, or leave it out",
        )
    config = build(ExtractConfig, {**given, "engine_args": assignments(engine_args, "--engine-arg")}, "dflash extract")
    if only_estimate:
        from .extract.estimate import estimate

        return show(estimate(config), as_json)
    from .extract.run import run
    from .train.fidelity import TeacherCheck

    show(run(config, TeacherCheck), as_json)


@main.command()
@click.argument("cache", type=FOLDER)
@json_option
@debug_option
def inspect(cache: Path, as_json: bool) -> None:
    """Show what is in a cache: model, layers, tokens, bytes per token, lengths, norms by layer.

    \b
    dflash inspect qwen36-cache
    dflash inspect qwen36-cache --json | jq .bytes_per_token
    """
    from .train.inspect_cache import inspect as describe

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
@click.option("--out", type=FOLDER, required=True, help="Folder of the run.")
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="YAML file of fields.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Set one field. Repeatable.")
@click.option("--dry-run", "only_resolve", is_flag=True, help="Resolve, validate and print the configuration; train nothing.")
@click.option("--resume", is_flag=True, help="Continue the run in --out.")
@json_option
@debug_option
def train(
    caches: tuple[Path, ...], out: Path, config_file: Path | None, overrides: tuple[str, ...], only_resolve: bool, resume: bool, as_json: bool
) -> None:
    """Train a drafter from feature caches. Needs the caches alone: no target, no tokenizer, no network.

    \b
    dflash train --cache qwen36-cache --out runs/base
    dflash train --cache qwen36-cache --out runs/block8 --set model.block_size=8 --set optim.lr=3e-4
    """
    from .common.config import load
    from .train.config import TrainConfig

    config = load(TrainConfig, file=config_file, overrides=overrides)
    if only_resolve:
        from .train.resolve import dry_run

        click.echo(json.dumps(dry_run(config, list(caches)), indent=2))
        return
    from .train.run import run

    show(run(config, list(caches), out, resume=resume), as_json)


@main.command("eval")
@click.option("--cache", "caches", type=FOLDER, multiple=True, help="Held-out feature cache: acceptance length offline. Repeatable.")
@click.option("--drafter", type=FOLDER, required=True, help="A run's folder or an exported drafter.")
@click.option("--engine", type=click.Choice(["vllm"]), help="Serve target and drafter for real.")
@click.option("--model", help="Target, with --engine.")
@click.option("--data", multiple=True, help="Prompts (JSONL with messages), with --engine. Repeatable.")
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

        given = {name: value for name, value in {**flags, "limit": limit}.items() if value is not None}
        config = build(
            ServeConfig, {**given, "drafter": drafter, "engine_args": assignments(engine_args, "--engine-arg")}, "dflash eval --engine vllm"
        )
        return show(evaluate_served(config), as_json)
    if unused := [name for name, value in {**flags, "engine_args": engine_args}.items() if value]:
        names = ", ".join("--" + name.removesuffix("s" if name == "engine_args" else "").replace("_", "-") for name in unused)
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
