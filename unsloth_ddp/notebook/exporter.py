"""Offer the converter as an nbconvert exporter: `jupyter nbconvert --to unsloth-ddp notebook.ipynb`."""

from typing import Any

from nbconvert.exporters import Exporter
from traitlets import Bool, Int, Unicode, Union, default

from unsloth_ddp.notebook.convert import convert_notebook
from unsloth_ddp.notebook.read.reader import from_node
from unsloth_ddp.notebook.types import ConversionOptions


class UnslothDDPExporter(Exporter):
    """Export an Unsloth notebook as a script that trains under DDP."""

    export_from_notebook = "Unsloth DDP script"
    output_mimetype = "text/x-python"

    per_device_batch_size = Union(
        [Int(), Unicode()], default_value=1, help="rows a process takes at once, or keep for the notebook's own"
    ).tag(config=True)
    tensorboard = Bool(False, help="report to TensorBoard").tag(config=True)
    seed = Int(3407, help="for splits, shuffles and samples that have none").tag(config=True)

    @default("file_extension")
    def _file_extension_default(self) -> str:
        return ".py"

    def from_notebook_node(  # type: ignore[override]  # every exporter returns text, whatever the base says
        self, nb: Any, resources: dict[str, Any] | None = None, **kwargs: Any
    ) -> tuple[str, dict[str, Any]]:
        """Convert a notebook that nbconvert has read; the report goes to its log."""
        _, resources = super().from_notebook_node(nb, resources, **kwargs)
        name = (resources.get("metadata") or {}).get("name") or "notebook"
        size = self.per_device_batch_size
        options = ConversionOptions(None if size == "keep" else int(size), self.tensorboard, self.seed)
        conversion = convert_notebook(from_node(nb, f"{name}.ipynb"), options)
        self.log.info("%s", conversion.report.summary("-> a script that trains under DDP"))
        return conversion.script, resources
