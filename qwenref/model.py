"""Whole models: a text model with its head, alone (ForCausalLM) or inside the composite (ForConditionalGeneration)."""

import inspect

import numpy as np

from qwenref import absent, weights
from qwenref.errors import CapabilityMissing, InputError, compose
from qwenref.inputs import checked_keep, hidden_or_ids, refuse_unknown
from qwenref.layers import Linear
from qwenref.module import Module
from qwenref.numerics import profile, unless_chosen
from qwenref.outputs import ModelOutput
from qwenref.pictures import Handed
from qwenref.step import OpensSteps, Step
from qwenref.text import TextModel
from qwenref.vision import VisionModel


class LanguageModel(OpensSteps, Module):
    """What both models are: a backbone, a head, and what opening them has found out.

    `.config` as stored · `.report` what loading saw · `.path` folder of the files, or None · `.numerics` profile name ·
    `.origin` where the weights came from.  An opened model pickles as the path of its files and what was changed since.
    """

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        self.config = config
        self.report = self.path = self.origin = None
        self._numerics = "fp32"
        self._files = {}  # tokenizer and the like, opened when first asked for
        text = config.text_config
        self._add_backbone(config, dtype)
        self.lm_head = Linear(text.hidden_size, text.vocab_size, dtype=dtype, point="logits")

    @property
    def text_model(self):
        """The TextModel inside."""
        raise NotImplementedError

    def _absent(self, name):
        return absent.from_stack(self, self._BACKBONE, name)

    @property
    def numerics(self):
        """Name of the profile its calls run by, unless `with qwenref.numerics(...)` says otherwise; may be assigned."""
        return self._numerics

    @numerics.setter
    def numerics(self, name):
        self._numerics = profile(name).name

    @property
    def device(self):
        """The word "meta" for a model without data, else "cpu"."""
        return "meta" if any(p.is_meta for p in self.parameters()) else "cpu"

    @property
    def tokenizer(self):
        """Tokenizer of the checkpoint's folder; an error says what is missing."""
        if "tokenizer" not in self._files:
            from qwenref.tokenizer import Tokenizer

            if self.path is None:
                raise CapabilityMissing(
                    compose("tokenizer: this model was not opened from a folder", do="use from_pretrained(...)")
                )
            self._files["tokenizer"] = Tokenizer(self.path)
        return self._files["tokenizer"]

    @property
    def processor(self):
        """`Processor` of the checkpoint's folder, for images and videos; an error says what is missing."""
        if "processor" not in self._files:
            from qwenref.processing import Processor

            if self.path is None:
                raise CapabilityMissing(
                    compose("processor: this model was not opened from a folder", do="use from_pretrained(...)")
                )
            self._files["processor"] = Processor(self.path, lambda: self.tokenizer)
        return self._files["processor"]

    def tie_weights(self):
        """Let the head be the embedding: one array under two names."""
        self.lm_head.weight = self.text_model.embed_tokens.weight

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        pixel_values=None,
        image_grid_thw=None,
        pixel_values_videos=None,
        video_grid_thw=None,
        sequence_ids=None,
        logits_to_keep=0,
        use_cache=False,
        output_hidden_states=False,
        output_attentions=False,
        mm_token_type_ids=None,
        **unknown,
    ):
        """Logits float32 [B, T, vocab] (float64 under fp64) and what else was asked for.

        input_ids int [T] or [B, T] · attention_mask [B, T] or [B, past + T], 1 keep, 0 pad: a pad is skipped ·
        position_ids [B, T] or [3, B, T] · cache a qwenref.Cache, filled in place when the call succeeds ·
        sequence_ids [B, T]: a change starts a new sequence · logits_to_keep n: logits of the last n tokens, 0 all,
        or a list of tokens (-1 the last) · hidden_states: embeddings, each layer, the last one after the final norm;
        residuals: the same without that norm.

        pixel_values [patches, width], image_grid_thw [n, 3] (1, height, width in patches): the images of this call in
        the order of their placeholders, row after row; pixel_values_videos, video_grid_thw the same for videos, whose
        frame groups stand each behind a timestamp.  A picture is handed over once, with the call in which its first
        placeholder comes.  A cache keeps what the prompt has not come to yet, also inside of a picture, and one of a
        single row also keeps pictures that come early.  The placeholders of each have to be as many as its grid makes.
        mm_token_type_ids [B, T]: 0 makes a placeholder id text.  In a call that brings no picture to a row that waits
        for none, a lone placeholder outside of vision marks is text, as models write such ids.
        rope_deltas int64 [B]: next position minus number of tokens; with a cache, or where pictures were met.
        """
        older = unknown.pop("past_key_values", None)
        refuse_unknown(unknown, _KEYWORDS)
        if older is not None and cache is not None and older is not cache:
            raise InputError(
                compose("forward: cache and past_key_values", found="two caches", expected="one of the two")
            )
        cache = older if cache is None else cache
        pictures = {
            "pixel_values": pixel_values,
            "image_grid_thw": image_grid_thw,
            "pixel_values_videos": pixel_values_videos,
            "video_grid_thw": video_grid_thw,
            "mm_token_type_ids": mm_token_type_ids,
        }
        pictures = {name: value for name, value in pictures.items() if value is not None}
        if pictures and not self._SEES:
            raise CapabilityMissing(
                compose(
                    f"forward: {next(iter(pictures))} for a model of text alone",
                    expected="a ForConditionalGeneration",
                    do="open the checkpoint with its vision tower",
                )
            )
        keeps = cache is not None or use_cache
        text = self.config.text_config
        with unless_chosen(self.numerics):
            input_ids, inputs_embeds = hidden_or_ids(text, input_ids, inputs_embeds)
            B, T = (inputs_embeds if input_ids is None else input_ids).shape[:2]
            keep = checked_keep(logits_to_keep, T)
            with Step.start(
                self, cache, text, B, T, attention_mask, position_ids, sequence_ids, encloses=2, keeps=keeps
            ) as step:
                out = self.model(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    cache=step.cache,
                    inputs_embeds=inputs_embeds,
                    use_cache=use_cache,
                    output_hidden_states=output_hidden_states,
                    output_attentions=output_attentions,
                    **pictures,
                )
                hidden = out.last_hidden_state
                logits = self.lm_head(hidden if keep is None else np.ascontiguousarray(hidden[:, keep]))
        return ModelOutput(
            logits=logits,
            cache=step.cache if keeps else None,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            residuals=out.residuals,
            rope_deltas=step.cache.rope_deltas if keeps or step.placing.merges else None,
        )

    def run(self, *args, **options):
        """Hidden states behind some of the layers, before the final norm: run(input_ids=None, start=0, stop=None,
        hidden=None, cache=None, attention_mask=None, position_ids=None); see `TextModel.run`."""
        with unless_chosen(self.numerics):
            return self.text_model.run(*args, **options)

    def edits(self):
        """Weights that are not what the file (or the seed) holds: name, elements, largest change."""
        return weights.edits(self)

    def edited(self):
        """Names of the changed weights, found without reading whole weights; see `qwenref.weights.edited`."""
        return weights.edited(self)

    def reset(self, names=None):
        """Undo changes of weights, all or those the patterns name; the names of what was changed.

        The next forward has the bits of a model just opened.
        """
        return weights.reset(self, names)

    def generate(self, input_ids, **options):
        """Continue a prompt; see `qwenref.generate.generate`."""
        from qwenref.generate import generate

        return generate(self, input_ids, **options)

    def chat(self, messages, **options):
        """Answer a conversation; see `qwenref.chat.chat`."""
        from qwenref.chat import chat

        return chat(self, messages, **options)

    def save_pretrained(self, path):
        """Write config.json and model.safetensors into the folder `path`, which transformers opens as well."""
        from qwenref.loading import save

        save(self, path)


_KEYWORDS = tuple(
    name for name in inspect.signature(LanguageModel.forward).parameters if name not in ("self", "unknown")
)


class ForCausalLM(LanguageModel):
    """Text only: `model.layers...`, `lm_head`."""

    _BACKBONE = "model."
    _SEES = False

    def _add_backbone(self, config, dtype):
        self.model = TextModel(config.text_config, dtype)

    @property
    def text_model(self):
        """The TextModel inside."""
        return self.model


class Model(OpensSteps, Module):
    """The composite without its head: `visual`, where the checkpoint has one, and `language_model`."""

    output_dims = "B, T, H"

    def __init__(self, config, dtype="bfloat16"):
        super().__init__()
        self.sizes = {"H": config.text_config.hidden_size}
        self.config = config
        if config.vision_config is not None:
            self.visual = VisionModel(config.vision_config, dtype)
        self.language_model = TextModel(config.text_config, dtype)

    def _absent(self, name):
        if name == "visual":
            return f"{type(self).__name__} has no visual: the checkpoint has no vision tower"
        return absent.from_stack(self, "language_model.", name)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        pixel_values=None,
        image_grid_thw=None,
        pixel_values_videos=None,
        video_grid_thw=None,
        mm_token_type_ids=None,
        sequence_ids=None,
        use_cache=False,
        **options,
    ):
        """See `TextModel.forward`, and for pictures `ForConditionalGeneration.forward`.

        The tower runs once, on all pictures of the call; its rows take the places of their placeholders in what the
        text model gets as embeddings.
        """
        text = self.config.text_config
        input_ids, inputs_embeds = hidden_or_ids(text, input_ids, inputs_embeds)
        B, T = (inputs_embeds if input_ids is None else input_ids).shape[:2]
        keeps = cache is not None or use_cache
        with Step.start(
            self, cache, text, B, T, attention_mask, position_ids, sequence_ids, encloses=1, keeps=keeps
        ) as step:
            images, videos = (pixel_values, image_grid_thw), (pixel_values_videos, video_grid_thw)
            handed = Handed(self.config, input_ids, (B, T), images, videos, mm_token_type_ids, exact=not step.keeps)
            step.place(handed)
            if handed.given or step.placing.merges:
                hidden = self.language_model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
                step.features = handed.features(getattr(self, "visual", None), text.hidden_size)
                input_ids, inputs_embeds = None, step.placing.embedded(hidden, step.features)
            out = self.language_model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=step.cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **options,
            )
        if not keeps:
            out.cache = None
        return out


class ForConditionalGeneration(LanguageModel):
    """Text and vision: `model.language_model.layers...`, `lm_head`."""

    _BACKBONE = "model.language_model."
    _SEES = True

    def _add_backbone(self, config, dtype):
        self.model = Model(config, dtype)

    @property
    def text_model(self):
        """The TextModel inside."""
        return self.model.language_model
