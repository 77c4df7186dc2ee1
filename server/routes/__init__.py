"""The routes, one file each."""

from bigmodel.server.routes import chat, completions, health, metrics, models, page, plan, tokens

ROUTERS = tuple(module.router for module in (completions, chat, models, tokens, health, plan, metrics, page))
