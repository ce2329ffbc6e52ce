"""Two engines, same weights, same prompt, different text: which one is outside what rounding explains, and where."""
