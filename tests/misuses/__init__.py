"""What happens when gshard is used wrongly: a table, and one test that goes through it.

`one_process` and `several_processes` contain the rows: a misuse in plain English, a function that
does it, and what a user sees. `docs/development/misuses.md` is generated from them by
`python -m tests.misuses.page`.
"""
