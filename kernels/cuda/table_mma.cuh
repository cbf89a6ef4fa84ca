// What split_units and table_mma share.
#define UNIT (GROUP < 128 ? GROUP : 128) /* columns of x that have a power of two of their own */
#define UNITS (COLS / UNIT)
