"""Events of the engine written as OpenAI's JSON, whole or in chunks."""
