"""The `gshard` command: plan, advise, audit, explain, launch, doctor, verify.

May import: everything.
Start reading: `main`, then `plan`.
"""
