// What a compiler's own header declares of OpenCL C, as far as the kernels need it; in front of each.
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong, size_t;
typedef uint cl_mem_fence_flags;
typedef enum { memory_scope_work_item, memory_scope_work_group, memory_scope_device, memory_scope_all_svm_devices, memory_scope_sub_group } memory_scope;
typedef enum { memory_order_relaxed, memory_order_acquire = 2, memory_order_release, memory_order_acq_rel, memory_order_seq_cst } memory_order;
typedef struct {
    int unused;
} ndrange_t;

#define inline static inline /* by C's own rule a function that is not inlined would be defined elsewhere */

#define OF_2_4_8_16(type) \
    typedef type type##2 __attribute__((ext_vector_type(2))); \
    typedef type type##4 __attribute__((ext_vector_type(4))); \
    typedef type type##8 __attribute__((ext_vector_type(8))); \
    typedef type type##16 __attribute__((ext_vector_type(16)))
OF_2_4_8_16(char);
OF_2_4_8_16(uchar);
OF_2_4_8_16(short);
OF_2_4_8_16(ushort);
OF_2_4_8_16(int);
OF_2_4_8_16(uint);
OF_2_4_8_16(long);
OF_2_4_8_16(ulong);
OF_2_4_8_16(float);
#ifdef FP16
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
OF_2_4_8_16(half);
#define as_half4(x) __builtin_astype((x), half4)
#endif
#define as_char4(x) __builtin_astype((x), char4)
#define as_uchar4(x) __builtin_astype((x), uchar4)
#define as_uint(x) __builtin_astype((x), uint)
#define as_float(x) __builtin_astype((x), float)
#define CLK_LOCAL_MEM_FENCE 1
#define CLK_GLOBAL_MEM_FENCE 2
#define INFINITY __builtin_inff()
