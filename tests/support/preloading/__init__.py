"""Test processes with torch, DeepSpeed, transformers and vLLM already imported, as children of their caller.

`starter.py` replaces the part of `subprocess` that starts `python -m <module>`; `zygote.py` is the process that has imported
everything and forks. A forked process is like any other: a child of the process that requested it, with its own command line,
signals, group and exit code.
"""
