"""Notebook to DDP script: `convert(path)` reads an Unsloth notebook and returns a script and a report."""

from unsloth_ddp.notebook.convert import convert
from unsloth_ddp.notebook.types import Conversion, Finding, NotebookError, Options, Report

__all__ = ["Conversion", "Finding", "NotebookError", "Options", "Report", "convert"]
