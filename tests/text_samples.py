"""300 texts on which tokenizers are known to part: scripts, marks, joiners, blanks, digits, code, look-alikes."""

import random
import unicodedata

KINDS = {
    "latin": [
        "What is 47 + 38?",
        "naïve café",
        "Straße, GRÖSSE",
        "Łódź żółw",
        "it's WE'LL I'd they’ve",
        "a-b_c/d",
        "Å ﬁne ½",
    ],
    "decomposed": [
        unicodedata.normalize("NFD", text) for text in ("naïve café", "Tiếng Việt", "Å ö ñ", "한국어", "ギガ")
    ],
    "marks": [
        "नमस्ते दुनिया",
        "ภาษาไทยที่นี่",
        "မြန်မာစာ",
        "தமிழ் மொழி",
        "বাংলা",
        "a\u0301\u0302\u0303b",
        "\u0301x",
        "\u0958\u212b",
    ],
    "cjk": ["你好，世界。", "狐狸在哪里？", "東京タワーは高い", "안녕하세요 세계", "㍿ ﷺ Ⅳ", "𠮷野家"],
    "emoji": ["👩‍👩‍👧‍👦", "🇫🇷🇩🇪", "👍🏽", "❤️‍🔥", "☕️ ☕", "1️⃣"],
    "right to left": ["مرحبا بالعالم", "مَرْحَبًا", "שלום עולם", "שָׁלוֹם", "\u200fabc\u200e", "١٢٣ 456"],
    "code": [
        "def f(x):\n\treturn x**2",
        "for (int i=0;i<n;++i) {\n    a[i] *= 2;\n}",
        "<a href='x'>&amp;</a>",
        "$\\frac{1}{2}$",
    ],
    "digits": ["0123456789", "1,000,000.00", "3.14e-5", "0x7F", "²³ ½ Ⅷ", "1 2  3"],
    "blanks": [
        " ",
        "  ",
        "\n",
        "\n\n\n",
        " \n ",
        "\t\t",
        "\r\n",
        "a  b   c",
        "\u00a0\u3000",
        "\u2028\u200b",
        "   \n\n  x",
    ],
    "markers": ["<|im_start|>user\n", "<|im_end|>", "<think>\n", "</think>", "<|im_start|", "<|IM_END|>", "< |im_end|>"]
    + ["<tool_call>", "<|not_a_token|>", "<|im_end|><|im_end|>", "<|endoftext|>x", "<think", "<tool_response>"],
    "controls": ["\x00", "\x01\x7f", "\ufeff", "\ufffd", "\U0010ffff", "\U000e0001"],
}


def texts(count=300):
    """The samples one by one, then mixtures of them drawn with a fixed seed."""
    draw = random.Random(6)
    made = ["", *(text for kind in KINDS.values() for text in kind)]
    while len(made) < count:
        made.append("".join(draw.choice(KINDS[draw.choice(list(KINDS))]) for _ in range(draw.randrange(2, 7))))
    return made
