# Install rules, and the package that find_package(zero) finds.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(zero_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/zero")

install(TARGETS zero EXPORT zero-targets FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
foreach(header IN LISTS zero_sdk_headers)
  file(RELATIVE_PATH relative "${PROJECT_SOURCE_DIR}/include" "${header}")
  get_filename_component(folder "${relative}" DIRECTORY)
  install(FILES "${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/${folder}")
endforeach()
install(FILES "${CMAKE_CURRENT_LIST_DIR}/zero_sdk.cmake" DESTINATION "${zero_package_dir}")
install(EXPORT zero-targets NAMESPACE zero:: DESTINATION "${zero_package_dir}")

configure_package_config_file(
  "${CMAKE_CURRENT_LIST_DIR}/zero-config.cmake.in" "${PROJECT_BINARY_DIR}/zero-config.cmake"
  INSTALL_DESTINATION "${zero_package_dir}")
# Before 1.0.0 a minor version may break what the one before it promised.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/zero-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/zero-config.cmake"
              "${PROJECT_BINARY_DIR}/zero-config-version.cmake"
        DESTINATION "${zero_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/zero")
