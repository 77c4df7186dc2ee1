"""The plan as a value: budgets, fields, JSON, tables, pictures."""
