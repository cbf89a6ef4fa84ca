// A sum whose first term was added to 0. Nothing keeps a device from dropping that 0, and -0 terms alone would leave -0.
float sum_from_zero(float sum) { return floatBitsToUint(sum) == 0x80000000u ? 0.0 : sum; }
