// The first position that the last of `length` positions attends to. WINDOW 0: it attends to all of them.
fn window_begin(length: u32) -> u32 { return select(0u, max(length, u32(WINDOW)) - u32(WINDOW), WINDOW > 0); }
