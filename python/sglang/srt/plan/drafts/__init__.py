"""Draft models: small models that propose a target's next tokens, each a description in the target's plan. No torch."""
