"""Find what a model's chat template reads, before its tokenizer is loaded."""

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.template import TRAINING, read_chat_template, variables_of
from unsloth_ddp.model.files.check import read_model_file, read_model_text


def template_variables(settings: Settings) -> frozenset[str]:
    """Return the names that the chat template of a run reads beside messages and tools; empty if it cannot be found."""
    if settings.chat_template not in (None, TRAINING):
        return variables_of(read_chat_template(str(settings.chat_template)))
    model = str(settings.model), settings.model_revision
    if text := read_model_text(model[0], "chat_template.jinja", model[1]):
        return variables_of(text)
    files = (read_model_file(model[0], name, model[1]) for name in ("chat_template.json", "tokenizer_config.json"))
    template = next((file["chat_template"] for file in files if file and file.get("chat_template")), None)
    if isinstance(template, list):
        template = {str(entry.get("name")): str(entry.get("template")) for entry in template}
    return variables_of(template)
