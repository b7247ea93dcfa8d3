"""A model family's chat form: template, special tokens, parsers, grammars."""
