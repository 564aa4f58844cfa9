# Compile SOURCE with SECTION defined, and check that the compiler fails and says EXPECTED; with no
# SECTION, check that it compiles. OPTIONS are further ones of the compiler.
set(define "")
if(SECTION)
  set(define "-D${SECTION}")
endif()
execute_process(COMMAND "${COMPILER}" -std=c++20 -fsyntax-only "-I${INCLUDE}" ${OPTIONS} ${define} "${SOURCE}"
                RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)

if(NOT SECTION)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "expected ${SOURCE} to compile, actual:\n${output}")
  endif()
elseif(result EQUAL 0)
  message(FATAL_ERROR "expected section ${SECTION} to fail, but it compiles")
elseif(NOT output MATCHES "${EXPECTED}")
  message(FATAL_ERROR "expected section ${SECTION} to say `${EXPECTED}`, actual:\n${output}")
endif()
