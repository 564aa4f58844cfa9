# What zero's own programs (tests, examples, benchmarks) share. Nothing here reaches a user's target.

# zero_program(target): warnings, and no compiler extensions.
function(zero_program target)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wconversion -Wshadow
                                           $<$<BOOL:${ZERO_WARNINGS_AS_ERRORS}>:-Werror>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict)  # false in its own std::string (PR105651)
    if("${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_RELEASE}" MATCHES "-march=native")
      # With AVX-512 it makes 2, 2, 2, 2 of std::vector<std::uint64_t>{2, 2, 2, 0}.
      target_compile_options(${target} PRIVATE -mno-avx512f)
    endif()
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND
     "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_DEBUG}" MATCHES "-fsanitize")
    # False with what sanitizers add, as GCC's manual says.
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
  endif()
endfunction()

# The same for what the CUDA compiler compiles. CMake 3.25 knows no CUDA_STANDARD 20.
set(zero_cuda_flags -std=c++20 -Werror all-warnings -Xcompiler=-Wall,-Wextra)

# zero_skip(what why): say, now and in <build>/skipped.txt, that something isn't built or tested here.
file(WRITE "${PROJECT_BINARY_DIR}/skipped.txt" "")
function(zero_skip what why)
  message(STATUS "zero: skipped ${what}: ${why}")
  file(APPEND "${PROJECT_BINARY_DIR}/skipped.txt" "${what}: ${why}\n")
endfunction()
