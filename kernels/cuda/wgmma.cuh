// Sums of a warpgroup's products of integers as operands of its instruction.
#include "hopper.cuh"

#define ACC(n) "+r"(acc[n][0]), "+r"(acc[n][1]), "+r"(acc[n][2]), "+r"(acc[n][3])
#define ACC4(n) ACC(n), ACC(n + 1), ACC(n + 2), ACC(n + 3)
#define NAMES8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES16 NAMES8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES32 NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
