"""Chat templates and the codec between messages and token ids.

Invariants (``tests/harness/test_template.py`` asserts each):

1. Token-in/token-out: ids that were sampled are never decoded and encoded again. A session is
   ``opening + messages + generation_prompt + sampled + close_turn(sampled) + messages + ...``.
2. Content never becomes structure: special-token text inside a message is encoded as ordinary text.
3. A session put together by the codec has the ids of ``apply_chat_template`` on the same messages (content without
   special-token text, model turns that do not begin with a line break).
4. ``generation_prompt() + encode_turn(text) + close_turn(...)`` is ``message(Message(Role.MODEL, text))``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_ext.harness.pieces import pieces
from megatron_ext.harness.protocol import Message
from megatron_ext.trajectory.record import Role

TEMPLATE_FILE = "chat_codec.json"
CACHED_TEXTS = 4096
CACHED_TEXT_LENGTH = 2048  # characters; a longer observation hardly repeats and would fill memory


class TemplateError(ValueError):
    """Tokenizer and chat template do not fit; the message names the file and what is missing."""


@dataclass(frozen=True)
class Frame:
    """What stands before and after a message's content."""

    prefix: str
    suffix: str


@dataclass(frozen=True)
class ChatTemplate:
    """How messages become text; ``special`` tokens in these strings are one id each.

    Attributes:
        name: for error messages.
        special: the tokens that carry structure; the tokenizer must have each as a special token.
        pad: padding token.
        bos: opens a session; may be empty.
        system, user, tool: frames of these roles.
        generation_prompt: what stands before a model turn.
        end: the token that ends a model turn, and is sampled.
        after_end: what follows ``end``, never sampled.
        also_stop: further tokens at which sampling stops.
    """

    name: str
    special: tuple[str, ...]
    pad: str
    bos: str
    system: Frame
    user: Frame
    tool: Frame
    generation_prompt: str
    end: str
    after_end: str = ""
    also_stop: tuple[str, ...] = ()

    def frame(self, role: Role) -> Frame:
        match role:
            case Role.SYSTEM:
                return self.system
            case Role.USER:
                return self.user
            case Role.TOOL:
                return self.tool
            case Role.MODEL:
                return Frame(self.generation_prompt, self.end + self.after_end)

    def token_ids(self, tokenizer: Tokenizer, source: str) -> dict[str, int]:
        """Id of each special token. Raises ``TemplateError`` that names all that are missing, and ``source``."""
        present = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        missing = [token for token in self.special if token not in present]
        if missing:
            raise TemplateError(
                f"{source}: the chat template {self.name!r} needs special tokens that the tokenizer lacks: "
                f"{', '.join(missing)}; add them as special tokens or choose a tokenizer that has them"
            )
        return {token: present[token] for token in self.special}

    def jinja(self) -> str:
        """The same template for ``apply_chat_template`` of ``transformers``."""

        def branch(keyword: str, role: str, frame: Frame) -> str:
            return (
                f"{{% {keyword} message['role'] == '{role}' %}}"
                f"{{{{ {json.dumps(frame.prefix)} + message['content'] + {json.dumps(frame.suffix)} }}}}"
            )

        return "".join(
            [
                f"{{{{ {json.dumps(self.bos)} }}}}" if self.bos else "",
                "{% for message in messages %}",
                branch("if", "system", self.system),
                branch("elif", "user", self.user),
                branch("elif", "tool", self.tool),
                branch("elif", "assistant", self.frame(Role.MODEL)),
                "{% else %}{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}{% endfor %}",
                f"{{% if add_generation_prompt %}}{{{{ {json.dumps(self.generation_prompt)} }}}}{{% endif %}}",
            ]
        )

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any], source: str) -> ChatTemplate:
        """Inverse of ``to_json``; ``source`` names the file in errors."""
        fields = dict(value)
        try:
            for role in ("system", "user", "tool"):
                fields[role] = Frame(**fields[role])
            for name in ("special", "also_stop"):
                fields[name] = tuple(fields[name])
            return ChatTemplate(**fields)
        except (TypeError, KeyError) as error:
            raise TemplateError(f"{source}: not a chat template ({error}); write it with save_tokenizer") from error


COMPACT = ChatTemplate(
    name="compact",
    special=("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|tool|>", "<|assistant|>", "<|end|>"),
    pad="<|pad|>",
    bos="<|bos|>",
    system=Frame("<|system|>", ""),
    user=Frame("<|user|>", ""),
    tool=Frame("<|tool|>", ""),
    generation_prompt="<|assistant|>",
    end="<|end|>",
)

# Qwen's layout. It shows tool results inside a user message; a run of several tool messages would share one there, but
# a harness sends one at a time.
CHATML = ChatTemplate(
    name="chatml",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    pad="<|endoftext|>",
    bos="",
    system=Frame("<|im_start|>system\n", "<|im_end|>\n"),
    user=Frame("<|im_start|>user\n", "<|im_end|>\n"),
    tool=Frame("<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n"),
    generation_prompt="<|im_start|>assistant\n",
    end="<|im_end|>",
    after_end="\n",
    also_stop=("<|endoftext|>",),
)

BUILT_IN = (COMPACT, CHATML)


class ChatCodec:
    """Messages to ids and sampled ids to text. Holds its own copy of the tokenizer; picklable; not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, source: str = "tokenizer") -> None:
        """``source`` names the tokenizer's file in errors. Raises ``TemplateError`` when special tokens are missing."""
        self.template = template
        self._source = source
        self._special = template.token_ids(tokenizer, source)
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True  # encode special-token text as the text that it is
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pieces = re.compile("(" + "|".join(re.escape(token) for token in template.special) + ")")
        self._cached = lru_cache(maxsize=CACHED_TEXTS)(self._encode)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # every id is below it
        self.pad_id = self._special[template.pad]
        self.end_id = self._special[template.end]
        self.stop_ids: tuple[int, ...] = (self.end_id, *(self._special[token] for token in template.also_stop))
        self._refuse_structure_in_text()
        self._opening = self._frame(template.bos, None, "")
        self._prompt = self._frame(template.generation_prompt, None, "")
        self._after_end = self._frame(template.after_end, None, "")

    def __reduce__(self) -> tuple[type[ChatCodec], tuple[Tokenizer, ChatTemplate, str]]:
        return ChatCodec, (self._tokenizer, self.template, self._source)

    @property
    def tokenizer(self) -> Tokenizer:
        """A copy of the tokenizer, with special tokens recognised in text as usual."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = False
        return copy

    def opening(self) -> list[int]:
        """Ids that open a session, before its first message."""
        return list(self._opening)

    def message(self, message: Message) -> list[int]:
        """Ids of one whole message with its frame. For a model turn that was sampled, use its ids instead."""
        if message.role is Role.MODEL:
            turn = self.encode_turn(message.content)
            return [*self._prompt, *turn, *self.close_turn(turn)]
        frame = self.template.frame(message.role)
        return self._frame(frame.prefix, message.content, frame.suffix)

    def generation_prompt(self) -> list[int]:
        """Ids after which the model samples its turn."""
        return list(self._prompt)

    def encode_turn(self, text: str) -> list[int]:
        """Ids that a model would have sampled to say ``text``, the end token included (demonstrations)."""
        return [*self._text(text), self.end_id]

    def close_turn(self, sampled: Sequence[int]) -> list[int]:
        """Ids to append, at mask 0, after the sampled ids of a model turn: the end token where sampling stopped without
        it (length, abort, another stop token), and what the template puts after it."""
        ended = len(sampled) > 0 and int(sampled[-1]) == self.end_id
        return [*([] if ended else [self.end_id]), *self._after_end]

    def decode_turn(self, sampled: Sequence[int]) -> str:
        """Text of a model turn without its stop token. Other special tokens stay visible; bytes that are no UTF-8
        become U+FFFD, so this is for parsing and display, never for training."""
        ids = [int(i) for i in sampled]
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each of these ids; joined they are the text of all."""
        return pieces(self._tokenizer, ids)

    def cut_turn(self, text: str, start: int, end: int) -> tuple[list[int], list[int]]:
        """Ids of a turn's text before ``text[start]``, and of ``text[start:end]``, as one tokenisation of all of it
        gives them: a token that lies across the start belongs to the second part."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        before: list[int] = []
        inside: list[int] = []
        for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if last <= start:
                before.append(token)
            elif first < end:
                inside.append(token)
        return before, inside

    def _encode(self, text: str) -> tuple[int, ...]:
        if not text.isascii():  # half of a surrogate pair, which Python strings can hold, becomes "?"
            text = text.encode("utf-8", "replace").decode()
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _text(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        return self._cached(text) if len(text) <= CACHED_TEXT_LENGTH else self._encode(text)

    def _frame(self, prefix: str, content: str | None, suffix: str) -> list[int]:
        """Ids of ``prefix + content + suffix``, where only prefix and suffix may hold special tokens. Text between two
        special tokens is encoded in one piece across the borders of content, as rendering the whole chat would."""
        before = self._pieces.split(prefix)  # text, token, text, token, ..., text
        after = self._pieces.split(suffix)
        parts = [*before[:-1], before[-1] + (content or "") + after[0], *after[1:]]
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._special[part])
            else:
                ids.extend(self._text(part))
        return ids

    def _refuse_structure_in_text(self) -> None:
        structure = set(self._special.values())
        for token in self._special:
            for text in (token, f" {token}", f"a{token}b"):
                if not structure.isdisjoint(self._encode(text)):
                    raise TemplateError(
                        f"{self._source}: the tokenizer encodes the text {token!r} as the special token even where it "
                        "is content, so an observation could forge a turn; remove it from the tokenizer's merges"
                    )


def load_codec(folder: Path, template: ChatTemplate | None = None) -> ChatCodec:
    """The codec of a tokenizer folder.

    The template is the argument if given, else the one that ``save_tokenizer`` left in the folder, else (a folder from
    elsewhere) the built-in one whose special tokens the tokenizer has.

    Raises:
        TemplateError: no readable ``tokenizer.json``, or no template fits; names the file and the missing tokens.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TemplateError(f"{path}: no such file; model.tokenizer must be a folder that holds tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise TemplateError(f"{path}: not a tokenizer that the tokenizers library reads: {error}") from error
    if template is None and (folder / TEMPLATE_FILE).is_file():
        template = _read_template(folder / TEMPLATE_FILE)
    if template is not None:
        return ChatCodec(tokenizer, template, str(path))
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    for candidate in BUILT_IN:
        if present.issuperset(candidate.special):
            return ChatCodec(tokenizer, candidate, str(path))
    lacks = "; ".join(
        f"{known.name!r} lacks {', '.join(token for token in known.special if token not in present)}"
        for known in BUILT_IN
    )
    raise TemplateError(f"{path}: the tokenizer has the special tokens of no chat template: {lacks}")


def _read_template(path: Path) -> ChatTemplate:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TemplateError(f"{path}: not JSON ({error}); write it again with save_tokenizer") from error
    if not isinstance(value, dict):
        raise TemplateError(
            f"{path}: not a chat template (a JSON object is wanted); write it again with save_tokenizer"
        )
    return ChatTemplate.from_json(value, str(path))
