# zero::cuda and zero::nccl: zero::zero with the CUDA toolkit, and with NCCL, where they are found.
find_package(CUDAToolkit QUIET)
if(CUDAToolkit_FOUND AND NOT TARGET zero::cuda)
  add_library(zero::cuda INTERFACE IMPORTED GLOBAL)
  target_link_libraries(zero::cuda INTERFACE zero::zero CUDA::cudart)
  # Kernels call the standard library's constexpr functions.
  target_compile_options(zero::cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)

  find_path(ZERO_NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} "$ENV{NCCL_HOME}/include")
  find_library(ZERO_NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} "${CUDAToolkit_LIBRARY_ROOT}/lib"
                                            "$ENV{NCCL_HOME}/lib")
  mark_as_advanced(ZERO_NCCL_INCLUDE_DIR ZERO_NCCL_LIBRARY)
  if(ZERO_NCCL_INCLUDE_DIR AND ZERO_NCCL_LIBRARY)
    add_library(zero::nccl INTERFACE IMPORTED GLOBAL)
    target_include_directories(zero::nccl SYSTEM INTERFACE "${ZERO_NCCL_INCLUDE_DIR}")
    target_link_libraries(zero::nccl INTERFACE zero::cuda "${ZERO_NCCL_LIBRARY}")
  endif()
endif()
