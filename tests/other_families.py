"""Tiny models other than causal language models: sequence to sequence, vision, vision with text, and audio, each with a batch.

The Transformers models come from its registries. All parameters are random, so that those initialized to zero have gradients, too.
Dropout and jitter are off: a split model may draw other random numbers than the same model on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zerobubble as zb
from tests.families import Outcome
from tests.libraries import library

SAMPLES = 4
VOCABULARY = 99
IMAGE_TOKEN = 5
WIDTH, HEADS, BLOCKS = 32, 4, 4
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "hidden_dim", "embedding_size", "projection_dim", "out_hidden_size"), WIDTH),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "mm_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "speech_encoder_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "decoder_layers", "encoder_layers", "num_encoder_layers"), BLOCKS),
    **dict.fromkeys(("num_decoder_layers", "depth", "speech_encoder_layers"), BLOCKS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "speech_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "relative_attention_num_buckets", "patch_size"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), 64),
    **dict.fromkeys(("num_mel_bins", "relative_attention_max_distance"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **{"vocab_size": VOCABULARY, "image_size": 32, "num_labels": 5, "vision_feature_layer": -1},
}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
IMAGE_TOKENS = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN, "video_token_id": 6}


class Example(NamedTuple):
    """A model in float64 and a batch for it."""

    model: nn.Module
    inputs: dict[str, Any]


def tiny_config(kind: Any, **own: Any) -> Any:
    """A configuration of this class with small sizes, and so those inside of it; `own` are settings of this one alone."""
    default = kind()
    known = default.to_dict()
    sizes = {name: size for name, size in SIZES.items() if type(known.get(name)) is int}
    sizes |= {name: number for name, number in (SPECIAL_TOKENS | IMAGE_TOKENS).items() if name in known}
    sizes |= {name: 0.0 for name, value in known.items() if ("drop" in name or "jitter" in name) and type(value) is float}
    for name in getattr(kind, "sub_configs", {}):
        inside = getattr(default, name, None)
        if inside is not None:
            sizes[name] = tiny_config(type(inside))
    if known.get("layer_types"):
        sizes["layer_types"] = (list(known["layer_types"]) * BLOCKS)[:BLOCKS]
    return kind(**(sizes | own))


def shaken(model: nn.Module) -> nn.Module:
    """The model in float64, no parameter as it was, and nothing dropped."""
    generator = torch.Generator().manual_seed(3)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "layerdrop", "dropout", "activation_dropout", "attention_dropout"):
            if type(getattr(module, name, None)) is float:
                setattr(module, name, 0.0)
    return model


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).double()


def tokens(length: int, seed: int = 1) -> Tensor:
    return torch.randint(10, VOCABULARY, (SAMPLES, length), generator=torch.Generator().manual_seed(seed))


def transformer(auto: str, family: str, **own: Any) -> nn.Module:
    """A tiny model of the family, by the class of Transformers that knows which class it is."""
    torch.manual_seed(0)
    transformers = library("transformers")
    transformers.logging.set_verbosity_error()
    config = tiny_config(transformers.CONFIG_MAPPING[family], **own)
    made: nn.Module = getattr(transformers, auto).from_config(config, attn_implementation="eager")
    return shaken(made)


def sequence_to_sequence(family: str, **own: Any) -> Example:
    ids = tokens(10)
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": tokens(6, seed=2)}
    return Example(transformer("AutoModelForSeq2SeqLM", family, **own), inputs)


def long_text(family: str, **own: Any) -> Example:
    """Sequence to sequence with a window of attention, and a first token that attends to all: windows of padding alone give no numbers."""
    model, inputs = sequence_to_sequence(family, **own)
    everywhere = torch.zeros_like(inputs["input_ids"])
    everywhere[:, 0] = 1
    return Example(model, {**inputs, "global_attention_mask": everywhere})


def speech(family: str, shape: tuple[int, ...], **own: Any) -> Example:
    inputs = {"input_features": numbers(SAMPLES, *shape), "decoder_input_ids": tokens(6)}
    return Example(transformer("AutoModelForSpeechSeq2Seq", family, **own), inputs)


def image_classes(family: str, size: int = 32, **own: Any) -> Example:
    known = library("transformers").CONFIG_MAPPING[family]().to_dict()
    own = {name: value for name, value in own.items() if name in known} | ({"image_size": size} if "image_size" in known else {})
    return Example(transformer("AutoModelForImageClassification", family, **own), {"pixel_values": numbers(SAMPLES, 3, size, size)})


def text(family: str, auto: str = "AutoModelForMaskedLM") -> Example:
    ids = tokens(10)
    return Example(transformer(auto, family), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def sound(family: str, **own: Any) -> Example:
    own |= {
        "conv_dim": (16, 16, 16),
        "conv_kernel": (10, 3, 2),
        "conv_stride": (5, 2, 2),
        "num_feat_extract_layers": 3,
        "mask_time_prob": 0.0,
    }
    own |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    return Example(transformer("AutoModelForCTC", family, **own), {"input_values": numbers(SAMPLES, 800)})


def two_towers(family: str) -> Example:
    """CLIP and similar models: an image encoder, a text encoder, and their similarities."""
    inputs = {
        "input_ids": tokens(8),
        "attention_mask": torch.ones(SAMPLES, 8, dtype=torch.long),
        "pixel_values": numbers(SAMPLES, 3, 32, 32),
    }
    return Example(transformer("AutoModel", family), inputs)


def images_and_text(family: str, images: Mapping[str, Tensor] | None = None, per_image: int = 16, **own: Any) -> Example:
    """An encoder of images in front of a language model; `per_image` is how many tokens stand for an image."""
    ids = tokens(6)
    ids = torch.cat([ids[:, :2], torch.full((SAMPLES, per_image), IMAGE_TOKEN), ids[:, 2:]], 1)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= images or {"pixel_values": numbers(SAMPLES, 3, 32, 32)}
    if family in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return Example(transformer("AutoModelForImageTextToText", family, **own), inputs)


def patches_and_text(family: str, **vision: Any) -> Example:
    """Qwen's vision models and similar ones: images of any size as rows of patches, whose number `image_grid_thw` gives."""
    transformers = library("transformers")
    kind = transformers.CONFIG_MAPPING[family]
    config = tiny_config(kind)
    sizes = {"embed_dim": WIDTH, "hidden_size": WIDTH, "patch_size": 4, "intermediate_size": 64, "in_channels": 3, **vision}
    for name, value in sizes.items():
        setattr(config.vision_config, name, value)
    config.text_config.rope_parameters["mrope_section"] = [1, 1, 2]
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    ids = tokens(6)
    ids = torch.cat([ids[:, :2], torch.full((SAMPLES, 4), IMAGE_TOKEN), ids[:, 2:]], 1)
    rows = numbers(16 * SAMPLES, 3 * config.vision_config.temporal_patch_size * 16)
    grid = torch.tensor([[1, 4, 4]] * SAMPLES)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": rows, "image_grid_thw": grid}
    return Example(shaken(model), inputs | {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()})


def of_torchvision(name: str = "", size: int = 32, make: Callable[[Any], nn.Module] | None = None) -> Example:
    torch.manual_seed(0)
    models = library("torchvision").models
    model = make(models) if make is not None else models.get_model(name, weights=None, num_classes=7)
    _narrow_head(model)
    return Example(shaken(model), {"x": numbers(SAMPLES, 3, size, size)})


def _narrow_head(model: nn.Module) -> None:
    """Make a head of several layers 32 wide: those of VGG and AlexNet hold a hundred million parameters, gigabytes in float64."""
    head = getattr(model, "classifier", None)
    if not isinstance(head, nn.Sequential):
        return
    places = [place for place, layer in enumerate(head) if isinstance(layer, nn.Linear)]
    widths = [head[places[0]].in_features, *[32] * (len(places) - 1), head[places[-1]].out_features] if places else []
    for place, (given, made) in zip(places, pairwise(widths), strict=True):
        head[place] = nn.Linear(given, made)


def _vision_transformer(models: Any) -> nn.Module:
    made: nn.Module = models.VisionTransformer(32, 8, BLOCKS, 2, WIDTH, 64, num_classes=7)
    return made


def _swin(models: Any) -> nn.Module:
    made: nn.Module = models.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=7)
    return made


def _convnext(models: Any) -> nn.Module:
    sizes = models.convnext.CNBlockConfig
    made: nn.Module = models.ConvNeXt([sizes(8, 16, 2), sizes(16, 32, 2), sizes(32, None, 2)], num_classes=7)
    return made


def of_timm(name: str, size: int = 32, **own: Any) -> Example:
    torch.manual_seed(0)
    return Example(shaken(library("timm").create_model(name, num_classes=7, **own)), {"x": numbers(SAMPLES, 3, size, size)})


def loss_of_all_outputs(output: Any, targets: Tensor) -> Tensor:
    """A loss in which every number counts that the model gives and that has a gradient."""
    leaves = pytree.tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output)
    trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    total = torch.zeros((), dtype=torch.float64)
    for number, leaf in enumerate(trained, 1):
        places = torch.arange(leaf.numel(), dtype=torch.float64).view(leaf.shape)
        total = total + (leaf.double() - torch.cos(number * places + targets.sum())).square().mean()
    return total


def _same(make: Callable[..., Example], *names: str, **own: Any) -> dict[str, Callable[[], Example]]:
    return {name: partial(make, name, **own) for name in names}


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": BLOCKS, "num_heads": 2}
SWIN = {"patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}
MIXER = {"img_size": 32}
FOUR = {"hidden_sizes": [16, 16, 32, 32], "depths": [2, 2, 2, 2]}

FAMILIES: dict[str, dict[str, Callable[[], Example]]] = {
    "Sequence to sequence": {
        **_same(sequence_to_sequence, "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "longt5"),
        **_same(sequence_to_sequence, "m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart"),
        "led": partial(long_text, "led", attention_window=4, max_encoder_position_embeddings=64),
        **_same(sequence_to_sequence, "prophetnet", "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma"),
        **_same(sequence_to_sequence, "t5gemma2", "umt5"),
    },
    "Images (Transformers)": {
        **_same(image_classes, "beit", "clip", "data2vec-vision", "dinov2", "dinov2_with_registers", "ijepa", "siglip", "vit"),
        **_same(image_classes, "vit_msn", "focalnet", "swiftformer"),
        **_same(image_classes, "swin", "swinv2", "donut-swin", **SWIN),
        **_same(image_classes, "convnext", "convnextv2", "poolformer", size=64, **FOUR),
        **_same(image_classes, "resnet", "regnet", size=64, embedding_size=16, groups_width=8, **FOUR),
        "bit": partial(image_classes, "bit", size=64, embedding_size=32, hidden_sizes=[32, 32, 64, 64], depths=[2, 2, 2, 2], num_groups=8),
        **_same(image_classes, "pvt", "segformer", size=64, num_attention_heads=[1, 1, 2, 2], **FOUR),
        **_same(image_classes, "mobilenet_v1", "mobilenet_v2", size=64, depth_multiplier=0.25),
        **_same(image_classes, "cvt", "mobilevit", "pvt_v2", "pp_lcnet", size=64),
    },
    "Images (timm)": {
        **_same(of_timm, "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "beit_base_patch16_224", **VIT),
        **_same(of_timm, "eva02_tiny_patch14_224", "cait_xxs24_224", "convit_tiny", "vit_relpos_small_patch16_224", **VIT),
        **_same(of_timm, "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", img_size=32, **SWIN),
        **_same(of_timm, "mixer_s16_224", "resmlp_12_224", "gmlp_ti16_224", **MIXER),
        **_same(of_timm, "resnet18", "seresnet18", "skresnet18", "dla34", "vovnet39a", "mobilenetv3_small_100", "regnety_002", size=64),
        **_same(of_timm, "ghostnet_100", "repvgg_a0", "hrnet_w18_small", "efficientnet_lite0", "mobilevit_xxs", "pvt_v2_b0", size=64),
        **_same(of_timm, "edgenext_xx_small", "mambaout_femto", "poolformer_s12", "xcit_nano_12_p16_224", size=64),
        **_same(of_timm, "levit_128s", "coat_tiny", "visformer_tiny", size=64, img_size=64),
        "resnet50": partial(of_timm, "resnet50", size=64, channels=(8, 16, 16, 16)),
        "resnetv2_50": partial(of_timm, "resnetv2_50", size=64, channels=(32, 32, 64, 64)),
        "convnext_atto": partial(of_timm, "convnext_atto", size=64, depths=(2, 2, 2, 2), dims=(8, 8, 16, 16)),
        "densenet121": partial(of_timm, "densenet121", size=64, growth_rate=4, block_config=(2, 2, 2)),
    },
    "Images (torchvision)": {
        **_same(of_torchvision, "resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "squeezenet1_1", size=64),
        **_same(of_torchvision, "shufflenet_v2_x0_5", "regnet_y_400mf", "mnasnet0_5", "googlenet", "alexnet", "vgg11", "vgg11_bn", size=64),
        "vit_b_16": partial(of_torchvision, make=_vision_transformer),
        "swin_t": partial(of_torchvision, make=_swin),
        "densenet121": partial(of_torchvision, make=lambda models: models.DenseNet(4, (2, 2, 2), 8, num_classes=7), size=64),
        "convnext_tiny": partial(of_torchvision, make=_convnext),
    },
    "Images and text": {
        **_same(two_towers, "clip", "siglip", "altclip", "chinese_clip"),
        **_same(images_and_text, "llava", "paligemma", "ovis2", "deepseek_vl"),
        **_same(images_and_text, "blip", "git", per_image=0),
        "gemma3": partial(images_and_text, "gemma3", per_image=4, mm_tokens_per_image=4),
        "internvl": partial(images_and_text, "internvl", per_image=1),
        "aya_vision": partial(images_and_text, "aya_vision", per_image=4),
        "blip-2": partial(images_and_text, "blip-2", per_image=32),
        **_same(images_and_text, "idefics3", "smolvlm", images={"pixel_values": numbers(SAMPLES, 1, 3, 32, 32)}, per_image=4),
        "idefics2": partial(images_and_text, "idefics2", images={"pixel_values": numbers(SAMPLES, 1, 3, 32, 32)}, per_image=64),
        **_same(patches_and_text, "qwen2_vl", "glm4v"),
        "qwen2_5_vl": partial(patches_and_text, "qwen2_5_vl", fullatt_block_indexes=[1, 3], window_size=16),
        "qwen3_vl": partial(patches_and_text, "qwen3_vl", deepstack_visual_indexes=[1, 2]),
    },
    "Audio": {
        "whisper": partial(speech, "whisper", (16, 20), max_source_positions=10),
        "speech_to_text": partial(speech, "speech_to_text", (20, 16), input_feat_per_channel=16),
        **_same(sound, "wav2vec2", "hubert", "wavlm", "unispeech", "data2vec-audio"),
    },
    "Text encoders": {
        **_same(text, "albert", "bert", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "ernie"),
        **_same(text, "fnet", "longformer", "mobilebert", "modernbert", "nystromformer", "rembert", "roberta"),
        **_same(text, "roformer", "squeezebert", "xlm", "xlm-roberta"),
    },
}


TOLERANCE, SMALL, NUM_STAGES, SEED = 1e-12, 1e-4, 3, 4


def outcome_of(group: str, name: str) -> Outcome:
    """How a model fares in this process, stage after stage."""
    try:
        model, inputs = FAMILIES[group][name]()
        plain = copy.deepcopy(model)
        torch.manual_seed(SEED)
        expected = loss_of_all_outputs(plain(**without_cache(model), **inputs), torch.zeros(SAMPLES))
        expected.backward()  # type: ignore[no-untyped-call]
        _refuse_what_is_no_number(plain)
    except Exception as error:
        return Outcome(name, error=f"not tried: {_in_a_line(error)}")
    try:
        return _compared(name, model, plain, inputs, expected)
    except zb.InputError as error:
        return Outcome(name, error=f"refused: {_in_a_line(error)}")
    except Exception as error:
        return Outcome(name, error=f"fails: {_in_a_line(error)}")


def _refuse_what_is_no_number(model: nn.Module) -> None:
    wrong = [name for name, parameter in model.named_parameters() if parameter.grad is not None and not parameter.grad.isfinite().all()]
    if wrong:
        raise ValueError(f"the gradient of {wrong[0]!r} is not finite on one device")


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The arguments, in addition to its inputs, with which a Transformers model is comparable to one that is cut."""
    config: Any = getattr(model, "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(type(config), "sub_configs", {}))]
    return {"use_cache": False} if any(getattr(each, "use_cache", False) for each in configs) else {}


def _compared(name: str, model: nn.Module, plain: nn.Module, inputs: dict[str, Any], expected: Tensor) -> Outcome:
    cut = zb.split(model, example=inputs)
    stages = [cut(stage, NUM_STAGES) for stage in range(NUM_STAGES)]
    given: Any = inputs
    torch.manual_seed(SEED)
    for stage in stages:
        given = stage(**given)
    loss = loss_of_all_outputs(given, torch.zeros(SAMPLES))
    loss.backward()  # type: ignore[no-untyped-call]
    held = {own: parameter for stage in stages for own, parameter in stage.named_parameters(remove_duplicate=False)}
    kept = {own: buffer for stage in stages for own, buffer in stage.named_buffers(remove_duplicate=False)}
    pairs = [(held[own].grad, parameter.grad) for own, parameter in plain.named_parameters(remove_duplicate=False)]
    worst = max(relative(ours, other) for ours, other in pairs)
    statistics = all(
        torch.equal(kept[own], buffer) for own, buffer in plain.named_buffers() if own.endswith("running_mean") and own in kept
    )
    found = relative(loss, expected)
    error = None if max(found, worst) <= TOLERANCE and statistics else f"differs: loss {found:.0e}, gradients {worst:.0e}"
    return Outcome(name, found, worst, len(cut.tied(NUM_STAGES)), error=error)


def relative(ours: Tensor | None, other: Tensor | None) -> float:
    """How far apart two tensors are, relative to the second, or to a small number where that is smaller; None counts as zeros."""
    if ours is None or other is None:
        given = other if ours is None else ours
        return 0.0 if given is None else float(given.norm() / SMALL)
    found = float((ours - other).detach().norm() / other.detach().norm().clamp_min(SMALL))
    return found if found == found else float("inf")


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "\\|")[:600]
