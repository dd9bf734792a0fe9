"""Commands that prepare training text: tokenize, describe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli import options
from spes_p2p.cli.terminal import ProgressBar
from spes_p2p.errors import UserError
from spes_p2p.observe.units import counted


def tokenize(
    inputs: Annotated[list[Path], typer.Argument(help=".jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt files.")],
    tokenizer: Annotated[Path, typer.Option(help="Path of the tokenizer.json.")],
    output: Annotated[Path, typer.Option(help="Folder for the token files and their manifest.")],
    prefix: Annotated[str, typer.Option(help="Prefix of the file names.")] = "",
    eos_token: Annotated[str, typer.Option(help="Token that ends each document.")] = "<|endoftext|>",
    text_field: Annotated[str, typer.Option(help="Name of the text field in JSON and Parquet.")] = "text",
    shard_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens per file.")] = None,
    url: options.Url = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing token files.")] = False,
) -> None:
    """Convert text to token files and a manifest."""
    from spes_p2p.data import tokenizing
    from spes_p2p.data.manifest import MANIFEST_NAME

    if shard_tokens is not None and shard_tokens < 1:
        raise UserError(f"--shard-tokens {shard_tokens}: must be at least 1")
    with ProgressBar("tokenizing") as update:
        manifest = tokenizing.tokenize(
            inputs, tokenizer, output, eos_token=eos_token, text_field=text_field, prefix=prefix, overwrite=overwrite,
            shard_tokens=shard_tokens or tokenizing.DEFAULT_SHARD_TOKENS, url=url,
            on_progress=lambda p: update(p.bytes_done, p.bytes_total),
        )
    print(f"{manifest.tokens} tokens in {counted(len(manifest.files), 'file')}: {output / f'{prefix}{MANIFEST_NAME}'}")


def describe(
    files: Annotated[list[Path], typer.Argument(help="Existing token files (SPES, OLMo).")],
    tokenizer: Annotated[Path, typer.Option(help="Path of the tokenizer.json that produced them.")],
    manifest: Annotated[Path, typer.Option(help="Path of the manifest to write.")],
    eos_token: Annotated[str, typer.Option(help="Token that ends each document.")] = "<|endoftext|>",
    dtype: Annotated[str | None, typer.Option(help="uint16 or uint32. Default: detected.")] = None,
    url: options.Url = None,
) -> None:
    """Write a manifest for existing token files."""
    from spes_p2p.data.tokenizing import describe_token_files

    if dtype not in (None, "uint16", "uint32"):
        raise UserError(f"--dtype {dtype}: token files are uint16 or uint32; leave it out to have it detected")
    with ProgressBar("reading") as update:
        made = describe_token_files(
            files, tokenizer, manifest, eos_token=eos_token, dtype=dtype, url=url, on_progress=update  # type: ignore[arg-type]
        )
    print(f"{made.tokens} tokens in {counted(len(made.files), 'file')}: {manifest}")
