"""Mesh, levels, rules, layouts, and the plan and budget that follow from them."""
