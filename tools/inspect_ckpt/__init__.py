"""See, trust and take out what is in a checkpoint: `python -m tools.inspect_ckpt`, installed as `inspect_ckpt`.

One module per command, each with `HELP`, `add_arguments` and `run`; `__main__` lists them. Beside them: `opening` (a
path becomes a step), `saves` (those that are not published), `times` (what the parts recorded), `blocks` (tensors in
bounded memory), `figures` (what elements mean), `output` (terminal, plain text, JSON), `pictures`, `foreign` (other
formats). Never imports torch, but for what `convert` does with torch's own formats, and imports itself relatively, for
it has two names.
"""
