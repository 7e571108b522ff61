"""Conversations as training data: checked, rendered by a chat template, tokenized with token-exact loss masks.

``conversation.py`` says what a conversation is, ``checks.py`` which of them may be trained on; a template
(``template.py``, ``jinja.py``) turns one into samples of pieces of text (``pieces.py``), ``masks.py`` those into tokens
and masks, and ``build.py`` many of them into a dataset.
"""
