"""Trains the small tokenizer the simulated engine ships with; the same output on every run.

A byte-level BPE of ``VOCAB_SIZE`` entries over sentences generated here from our own word list, written to
``publisher/assets/demo_tokenizer`` as ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat
template beside this script's text). Nearly every word of the list becomes one token, with and without a
leading space, so that generated text tokenizes back to the ids it came from.

Run: ``python scripts/train_demo_tokenizer.py [OUTPUT_DIR]``. A test holds the committed files against it.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

OUTPUT_DIR = Path(__file__).resolve().parent.parent / "publisher" / "assets" / "demo_tokenizer"
VOCAB_SIZE = 3072
NUM_SENTENCES = 40_000
MODEL_LENGTH_MAX = 32_768

BOS, EOS, START, PAD = "<|bos|>", "<|im_end|>", "<|im_start|>", "<|pad|>"


def words(text: str) -> list[str]:
    """The words of a list written as plain text."""
    return text.split()


NOUNS = words(
    """
assistant system tool engine router block cache token prefix window group layer model server client
request answer question batch queue step budget memory page pool copy hash chain tree leaf root index
table row column key value
message event stream socket port host node rack cluster fleet pod region zone network packet frame
garden river mountain forest valley island harbor bridge tower castle village city street market square
window door table chair lamp candle mirror clock book page letter map paper pencil picture story poem
song music drum violin piano guitar voice silence winter summer spring autumn morning evening midnight
rain snow wind storm cloud thunder sun moon star planet comet ocean wave shore sand stone metal copper
silver gold iron glass wood leather cotton wool bread butter cheese apple orange lemon cherry pepper salt
sugar honey coffee tea water milk soup dinner breakfast kitchen baker farmer sailor teacher doctor painter
writer reader driver pilot soldier captain king queen prince neighbor friend family mother father sister
brother child student engineer scientist lawyer nurse judge reporter singer dancer horse dog cat bird fish
lion tiger bear wolf fox rabbit mouse snake spider butterfly bee tree flower grass seed fruit branch root
train station ticket road wheel car truck boat ship plane airport passenger journey holiday hotel room
computer program function variable string number list dictionary array loop error test result output input
file folder database record field query user account password version release change review comment
report summary paragraph sentence word language grammar theory proof example problem solution method
experiment measure sample average error signal noise energy force mass speed light heat pressure
company product price customer order invoice payment bank loan market share profit tax budget office
meeting project plan deadline task team manager contract policy rule law court history culture science
"""
)
VERBS = words(
    """
holds keeps sends takes gives finds loses opens closes reads writes counts sorts moves carries follows
leads starts stops waits runs walks jumps falls rises grows shrinks builds breaks repairs paints draws
sings plays listens hears sees watches looks thinks knows learns teaches explains describes compares
measures checks tests proves shows hides covers crosses reaches leaves enters joins divides adds removes
stores loads computes predicts routes serves answers asks calls returns raises handles avoids prevents
allows needs wants likes loves fears hopes believes remembers forgets chooses decides changes improves
"""
)
ADJECTIVES = words(
    """
small large quick slow bright dark heavy light warm cold quiet loud simple complex careful careless early
late young old new ancient modern common rare strong weak deep shallow wide narrow long short high low
empty full open closed clean dirty dry wet soft hard sharp round flat straight curved green blue red
yellow white black brown golden gentle brave clever honest patient curious famous hidden broken perfect
local global private public exact wrong right certain possible useful useless expensive cheap safe
"""
)
ADVERBS = words(
    """
slowly quickly quietly often never always sometimes again together alone twice here there today tomorrow
yesterday carefully exactly nearly hardly simply clearly finally suddenly usually already still soon
"""
)
GLUE = words(
    """
the a an and or but if when while because before after until since with without into from over under
between behind beside through across against about of to in on at by for as than then that this these
those each every some any no not only also both either which who what where why how is are was were be
been has have had do does did can could will would should may might must it its he she they we you I his
her their our your my me him them us one two three four five six seven eight nine ten first second third
next last same other another such more most less least very too so yes please thank you hello help
"""
)
SPECIAL_TEXT = (
    "You are a helpful assistant.",
    "def main(argument: str) -> int:\n    return len(argument)\n",
    "for item in range(10):\n    print(item, end=' ')\n",
    '{"name": "value", "items": [1, 2, 3], "type": "function", "arguments": {}}\n',
    "# Heading\n\n- first item\n- second item\n\n1. one\n2. two\n",
    "https://example.com/path?key=value&other=1\n",
    "What is the answer? I'm not sure; it's 3.14, isn't it? (See page 42!)\n",
)
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
    {{- '<|im_start|>tools\\n' -}}
    {%- for tool in tools -%}
        {{- tool | tojson + '\\n' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content -%}
        {{- message.content -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{- '\\ncall: ' + call.function | tojson -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def sentences(seed: int = 1) -> list[str]:
    """The corpus: simple sentences over the word lists, plus a little code, JSON and punctuation."""
    rng = random.Random(seed)
    pick = rng.choice
    lines = []
    for number in range(NUM_SENTENCES):
        words = [
            pick(GLUE),
            pick(ADJECTIVES),
            pick(NOUNS),
            pick(VERBS),
            pick(GLUE),
            pick(ADJECTIVES),
            pick(NOUNS),
            pick(ADVERBS),
            pick(GLUE),
            pick(NOUNS),
        ]
        if number % 3 == 0:
            words[0] = words[0].capitalize()
        lines.append(" ".join(words) + pick((".", ",", "?", "!", ":", ";")) + "\n" + pick(words))
        if number % 20 == 0:
            lines.append(f"{pick(SPECIAL_TEXT)}{rng.randrange(1000)} {rng.randrange(100_000)}\n")
    return lines


def train() -> Tokenizer:
    """The trained tokenizer; BOS is added where special tokens are asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, START, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def config() -> dict[str, object]:
    """``tokenizer_config.json`` as the usual loaders read it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MODEL_LENGTH_MAX,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def main(output_dir: Path = OUTPUT_DIR) -> None:
    """Write both files."""
    output_dir.mkdir(parents=True, exist_ok=True)
    trained = json.loads(train().to_str())
    text = json.dumps(trained, ensure_ascii=False, separators=(",", ":"), sort_keys=False)
    (output_dir / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    text = json.dumps(config(), ensure_ascii=False, indent=2)
    (output_dir / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
