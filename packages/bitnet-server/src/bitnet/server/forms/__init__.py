"""Forms of structured output: prepared here, compiled and matched in helper processes."""
