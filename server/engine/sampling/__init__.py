"""From logits to tokens: sampling parameters, penalties, grammars."""
