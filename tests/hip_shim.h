// What hipRTC has built in and this kernel needs, over the compiler's builtins: for a clang without ROCm.
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))

struct HipIndex {
    unsigned int x;
};
#define threadIdx (HipIndex{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (HipIndex{__builtin_amdgcn_workgroup_id_x()})
#define blockDim (HipIndex{__builtin_amdgcn_workgroup_size_x()})
// Code objects of version 5 begin their hidden arguments with the number of blocks.
#define gridDim (HipIndex{*(__attribute__((address_space(4))) const unsigned int*)__builtin_amdgcn_implicitarg_ptr()})
