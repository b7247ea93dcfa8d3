"""Chat formats of model families: template, special tokens, parsers, grammars."""
