"""The claims of texts about the paper, each with a verdict: `keras-preact reproduce
claims`.

`claims.toml` has the words, and names the function that measures each claim.
"""
