"""Make tiny random image-text models with their processors, as a user downloads them, and draw images to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import DEMO_MODEL
from tests.tiny_models import tiny_config, tiny_model

# How templates of the families write a chat; only Qwen's, Gemma's and InternVL's take texts too.
QWEN = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- for message in messages -%}{%- set role = 'model' if message.role == 'assistant' else "
    "message.role -%}{{ '<|' + ('assistant' if role == 'model' else role) + '|>' }}{%- if message.content is string "
    "-%}{{ message.content | trim }}{%- else -%}{%- for item in message.content -%}{%- if item.type == 'image' -%}{{ "
    "'<boi>' }}{%- elif item.type == 'text' -%}{{ item.text | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ "
    "'<|end|>' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
LISTS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' }}{% for line in message.content %}{% "
    "if line.type == 'text' %}{{ line.text }}{% elif line.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{{ "
    "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# model_type -> class of the checkpoint, class of the processor, class of its image processor with arguments, arguments
# of the processor, special tokens by the attribute of the tokenizer, chat template, fields of the config.
PATCHES = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84},
}
QWEN_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "ids": {"image_token_id": "image_token", "video_token_id": "video_token",
            "vision_start_token_id": "vision_start_token", "vision_end_token_id": "vision_end_token"},
        "model": "Qwen3VLForConditionalGeneration", "processor": "Qwen3VLProcessor",
        "images": ("Qwen2VLImageProcessor", PATCHES),
        "videos": "Qwen3VLVideoProcessor", "tokens": QWEN_TOKENS, "template": QWEN,
        "vision": {"deepstack_visual_indexes": [0], "num_position_embeddings": 36},
    },
    "qwen3_5": {
        "ids": {"image_token_id": "image_token", "video_token_id": "video_token",
            "vision_start_token_id": "vision_start_token", "vision_end_token_id": "vision_end_token"},
        "model": "Qwen3_5ForConditionalGeneration", "processor": "Qwen3VLProcessor",
        "images": ("Qwen2VLImageProcessor", PATCHES),
        "videos": "Qwen3VLVideoProcessor", "tokens": QWEN_TOKENS, "template": QWEN,
        "vision": {"num_position_embeddings": 36},
    },
    "gemma3": {
        "ids": {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
        "model": "Gemma3ForConditionalGeneration", "processor": "Gemma3Processor",
        "images": ("Gemma3ImageProcessor", {"size": {"height": 28, "width": 28}}), "arguments": {"image_seq_length": 4},
        "tokens": {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image_soft_token>"}, "template": GEMMA,
        "config": {"mm_tokens_per_image": 4}, "vision": {"image_size": 28, "patch_size": 14},
    },
    "gemma4": {
        "ids": {"image_token_id": "image_token", "boi_token_id": "boi_token", "eoi_token_id": "eoi_token",
            "audio_token_id": "audio_token", "boa_token_id": "boa_token", "eoa_token_index": "eoa_token"},
        "model": "Gemma4ForConditionalGeneration", "processor": "Gemma4Processor",
        "images": ("Gemma4ImageProcessor", {"patch_size": 14, "max_soft_tokens": 70, "pooling_kernel_size": 3}),
        "videos": "Gemma4VideoProcessor", "audio": "Gemma4AudioFeatureExtractor",
        "tokens": {
            "boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image_soft_token>",
            "audio_token": "<audio_soft_token>",
            "boa_token": "<boa>", "eoa_token": "<eoa>",
        },
        "template": GEMMA.replace("'<boi>'", "'<image_soft_token>'"),
    },
    "mistral3": {
        "ids": {"image_token_index": "image_token"}, "model": "Mistral3ForConditionalGeneration",
        "processor": "PixtralProcessor",
        "images": ("PixtralImageProcessor", {"patch_size": {"height": 28, "width": 28}, "size": {"longest_edge": 84}}),
        "arguments": {"patch_size": 14, "spatial_merge_size": 2},
        "tokens": {"image_token": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"},
        "template": LISTS.replace("<image>", "[IMG]"), "config": {"spatial_merge_size": 2},
    },
    "internvl": {
        "ids": {"image_token_id": "context_image_token"}, "model": "InternVLForConditionalGeneration",
        "processor": "InternVLProcessor",
        "images": ("GotOcr2ImageProcessor", {"size": {"height": 28, "width": 28}, "crop_to_patches": True,
            "min_patches": 1, "max_patches": 4}),
        "videos": "InternVLVideoProcessor", "arguments": {"image_seq_length": 1},
        "tokens": {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "template": QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\\n"),
        "vision": {"image_size": [28, 28], "patch_size": [14, 14]},
    },
    "smolvlm": {
        "ids": {"image_token_id": "image_token"}, "model": "SmolVLMForConditionalGeneration",
        "processor": "SmolVLMProcessor",
        "images": ("SmolVLMImageProcessor", {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}),
        "videos": "SmolVLMVideoProcessor", "arguments": {"image_seq_len": 1},
        "tokens": {"image_token": "<image>", "fake": "<fake_token_around_image>", "global": "<global-img>",
            "end": "<end_of_utterance>"},
        "template": LISTS, "config": {"scale_factor": 2}, "vision": {"image_size": 28, "patch_size": 14},
    },
}  # fmt: skip


def vision_tokenizer(kind: str) -> tuple[Any, dict[str, int]]:
    """Return the demo's tokenizer with the tokens and chat template of a kind, and the config with their ids."""
    import transformers

    spec = KINDS[kind]
    named = {name: token for name, token in spec["tokens"].items() if name.endswith("_token")}
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens=named)
    tokenizer.add_tokens(list(spec["tokens"].values()), special_tokens=True)
    tokenizer.chat_template = spec["template"]
    return tokenizer, {
        field: tokenizer.convert_tokens_to_ids(spec["tokens"][token]) for field, token in spec["ids"].items()
    }


def save_processor(kind: str, folder: Path, tokenizer: Any, sizes: dict[str, Any] | None = None) -> None:
    """Write the processor of a kind; `sizes` replace the arguments of its image processor."""
    import transformers

    spec = KINDS[kind]
    images, small = spec["images"]
    parts = {
        "image_processor": getattr(transformers, images)(**(small if sizes is None else sizes)),
        "tokenizer": tokenizer,
    }
    parts |= {"video_processor": getattr(transformers, spec["videos"])()} if "videos" in spec else {}
    parts |= {"feature_extractor": getattr(transformers, spec["audio"])()} if "audio" in spec else {}
    given = spec.get("arguments", {})
    getattr(transformers, spec["processor"])(**parts, chat_template=spec["template"], **given).save_pretrained(folder)


def save_vision(kind: str, folder: Path) -> Any:
    """Write a tiny image-text model with its processor; return the model."""
    spec = KINDS[kind]
    tokenizer, ids = vision_tokenizer(kind)
    config = tiny_config(kind, len(tokenizer))
    for part, fields in ((config, spec.get("config", {}) | ids), (config.vision_config, spec.get("vision", {}))):
        for field, value in fields.items():
            setattr(part, field, value)
    model = tiny_model(kind, spec["model"], len(tokenizer), tokenizer, config=config)
    model.save_pretrained(folder)
    save_processor(kind, folder, tokenizer)
    return model


COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")


def draw(path: Path, color: str, shape: str, size: tuple[int, int] = (56, 56)) -> Path:
    """Draw a shape; return the path."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, (250, 250, 250))
    box = (size[0] // 6, size[1] // 6, size[0] * 5 // 6, size[1] * 5 // 6)
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse(box, fill=COLORS[color])
    elif shape == "square":
        pen.rectangle(box, fill=COLORS[color])
    else:
        pen.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) // 2, box[1])], fill=COLORS[color])
    image.save(path)
    return path


def image_rows(folder: Path, numbers: tuple[int, ...] = (1, 0, 3, 2, 1, 0, 1, 3)) -> list[dict[str, Any]]:
    """Draw images; return chats with so many of them each, some in the middle and in a later turn beside 0 and 1."""
    rows = []
    for row, number in enumerate(numbers):
        color, shape = list(COLORS)[row % 4], SHAPES[row % 3]
        paths = [
            draw(
                folder / f"{row}_{place}.png", color, shape, (56 + 28 * ((row + place) % 3), 56 + 28 * (place % 2))
            ).name
            for place in range(number)
        ]
        parts: list[Any] = [{"type": "text", "text": "What is "}]
        parts += [{"type": "image", "image": path} for path in paths[:2]]
        parts += [{"type": "text", "text": f" here, {row}?"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": f"a {color} {shape}"}]
        if number > 2:
            more = [{"type": "image", "path": paths[2]}, {"type": "text", "text": "And the pet?"}]
            messages += [
                {"role": "user", "content": more},
                {"role": "assistant", "content": f"one more {shape} of {color}"},
            ]
        rows.append({"messages": messages})
    return rows
